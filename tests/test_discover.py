"""What there is is found by file name; ids are well formed, and a wrong plug-in is one clear line."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbench import discover
from rlbench.errors import UsageError
from rlbench.ops._op import DTYPES

ID = re.compile(r"[a-z0-9-]+(:[a-z_]+(=[a-z0-9_.]+)?(,[a-z_]+(=[a-z0-9_.]+)?)*)?")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Discovery without what was found before, and without what this test will find."""
    discover.engines.cache_clear()
    yield
    discover.engines.cache_clear()


@pytest.mark.parametrize("engine_id", discover.engines())
def test_engine_is_well_formed(engine_id: str) -> None:
    variant = discover.engines()[engine_id]
    assert variant.id == engine_id
    assert ID.fullmatch(engine_id)
    assert variant.name == engine_id.split(":", maxsplit=1)[0]
    assert len(set(variant.engine.variants)) == len(variant.engine.variants)
    assert set(variant.engine.load) <= set(discover.ops())
    assert variant.engine.load


def test_engines_of_the_first_issue_are_there() -> None:
    named = {
        "control",
        "torch-eager",
        "fa4",
        "fa2",
        "fa2:splits=1",
        "fa3",
        "fa3:splits=1",
        "rlbench",
    }
    sdpa = {f"torch-sdpa:backend={b}" for b in ("flash", "cudnn", "efficient", "math")}
    assert named | sdpa <= set(discover.engines())


@pytest.mark.parametrize("name", discover.ops())
def test_op_is_consistent(name: str) -> None:
    op = discover.ops()[name]
    assert op.name == name
    assert set(op.scenarios) <= set(discover.scenarios())
    assert {p for passes in op.scenarios.values() for p in passes} == set(op.passes)
    for device in ("cpu", "cuda"):
        assert set(op.default_cases[device]) <= set(op.models)
    with pytest.raises(UsageError, match=r"--case: 'qwen3-nex' .*Did you mean 'qwen3-next'"):
        op.case("qwen3-nex", DTYPES[0])


def test_case_ids_name_the_dtype_unless_it_is_the_usual_one() -> None:
    op = discover.ops()["attention"]
    assert [op.case("tiny", d).id for d in ("bf16", "fp16")] == ["tiny", "tiny:fp16"]


def test_selection_is_by_id_or_by_name_in_order_without_repeats() -> None:
    assert discover.select("--only", ["fa2:splits=1"]) == ["fa2:splits=1"]
    assert discover.select("--only", ["fa2"]) == ["fa2"], "an id before a name"
    assert discover.select("--only", ["fa2*"]) == ["fa2", "fa2:splits=1"]
    assert discover.select("--only", ["torch-sdpa"]) == [
        f"torch-sdpa:backend={b}" for b in ("flash", "cudnn", "efficient", "math")
    ]
    twice = discover.select("--only", ["torch-sdpa:backend=math", "control", "torch-sdpa"])
    assert twice[:2] == ["torch-sdpa:backend=math", "control"]
    assert len(twice) == len(set(twice)) == 5
    assert discover.select("--only", []) == []


@pytest.mark.parametrize("word", ["fa5", "torch-sdpa:backend=flsh", "", "FA4", "fa2:"])
def test_unknown_name_lists_what_there_is(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        discover.select("--skip", [word])
    message = str(caught.value)
    assert message.startswith(f"--skip: {word!r} is not known.")
    assert "torch-eager" in message and "torch-sdpa" in message
    assert "\n" not in message


def register(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = importlib.metadata.EntryPoint(name, value, discover.ENTRY_POINTS)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints([point])
    )


def plugin(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str = "mine") -> None:
    (folder / "some_plugin.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    register(monkeypatch, name, "some_plugin")


GOOD = """
from rlbench.engines._engine import Engine
ENGINE = Engine(summary="s", distribution="d", modules=("torch",), install="pip install d",
                load={"attention": None}, variants=((), (("fast", ""),)))
"""


def test_plugin_adds_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    plugin(tmp_path, monkeypatch, GOOD)
    found = discover.engines()
    assert {"mine", "mine:fast", "torch-eager"} <= set(found)
    assert found["mine"].source.file == str(tmp_path / "some_plugin.py")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "defines no ENGINE"),
        ("ENGINE = 3", "defines no ENGINE"),
        ("import not_there_at_all", "cannot be imported: ModuleNotFoundError"),
        ("raise ValueError('broken')", "cannot be imported: ValueError: broken"),
    ],
)
def test_wrong_plugin_is_named(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    plugin(tmp_path, monkeypatch, text)
    with pytest.raises(UsageError, match=rf"engine 'mine'.*{reason}"):
        discover.engines()


def test_plugin_whose_module_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    register(monkeypatch, "mine", "not_there_at_all")
    with pytest.raises(UsageError, match=r"'mine'.*'not_there_at_all'.*cannot be found"):
        discover.engines()


def test_plugin_of_a_taken_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    plugin(tmp_path, monkeypatch, GOOD, name="fa4")
    with pytest.raises(UsageError, match=r"'fa4' exists twice.*rlbench\.engines\.fa4.*some_plugin"):
        discover.engines()


def test_plugin_in_a_package_whose_parent_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    register(monkeypatch, "mine", "not_there_at_all.engine")
    with pytest.raises(UsageError, match="'mine'"):
        discover.engines()
