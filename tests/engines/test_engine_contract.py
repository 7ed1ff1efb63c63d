"""What is known of an engine before it is loaded: claims, and why it cannot run here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlbench import discover
from rlbench.engines._engine import Claim, Engine, module_exists, options_for
from rlbench.results.vocabulary import Property


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages none of which may be imported."""
    bomb = "raise SystemExit('imported')\n"
    (tmp_path / "bomb" / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "bomb" / "__init__.py").write_text(bomb)
    (tmp_path / "bomb" / "inner" / "__init__.py").write_text(bomb)
    (tmp_path / "bomb" / "inner" / "leaf.py").write_text(bomb)
    (tmp_path / "bomb" / "inner" / "deep" / "leaf.py").write_text(bomb)
    suffix = __import__("importlib.machinery").machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / "bomb" / f"_C{suffix}").write_bytes(b"not a library")
    (tmp_path / "spaces" / "name").mkdir(parents=True)
    (tmp_path / "spaces" / "name" / "leaf.py").write_text(bomb)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "there"),
    [
        ("bomb", True),
        ("bomb.inner", True),
        ("bomb.inner.leaf", True),
        ("bomb.inner.deep.leaf", True),
        ("bomb._C", True),
        ("spaces.name.leaf", True),
        ("bomb.absent", False),
        ("bomb.inner.leaf.absent", False),
        ("absent", False),
        ("absent.bomb", False),
        ("sys", True),
        ("json.decoder", True),
        ("torch", True),
    ],
)
def test_module_is_found_without_importing_it(packages: Path, module: str, there: bool) -> None:
    assert module_exists(module) is there
    assert not {name for name in sys.modules if name.split(".")[0] in ("bomb", "spaces")}


def test_nothing_of_torch_is_imported_to_find_it() -> None:
    code = (
        "import sys; from rlbench.engines._engine import module_exists; "
        "print(module_exists('torch.nn.attention'), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def engine(
    devices: tuple[str, ...] = ("cuda",),
    modules: tuple[str, ...] = ("json",),
    low: tuple[int, int] = (0, 0),
    high: tuple[int, int] = (99, 9),
) -> Engine:
    return Engine(
        summary="s",
        distribution="d",
        modules=modules,
        install="pip install it",
        load={},
        devices=devices,
        min_capability=low,
        max_capability=high,
    )


def test_reasons_name_what_is_missing_and_how_to_get_it() -> None:
    assert engine().why_not_here("cuda", (9, 0)) is None
    assert engine().why_not_here("cpu", None) == "needs a cuda device, not cpu"
    both = engine(devices=("cpu", "cuda"))
    assert both.why_not_here("cpu", None) is None
    assert both.why_not_here("xpu", None) == "needs a cpu or cuda device, not xpu"
    absent = engine(modules=("json", "absent.module"))
    reason = "module absent.module is not installed; to get it: pip install it"
    assert absent.why_not_here("cuda", (9, 0)) == reason


@pytest.mark.parametrize(
    ("low", "high", "has", "reason"),
    [
        ((8, 0), (99, 9), (7, 5), "needs compute capability 8.0, this device has 7.5"),
        ((9, 0), (9, 9), (10, 0), "needs compute capability 9.0 to 9.9, this device has 10.0"),
        ((9, 0), (9, 9), (8, 9), "needs compute capability 9.0 to 9.9, this device has 8.9"),
        ((9, 0), (9, 9), (9, 0), None),
        ((8, 0), (99, 9), (12, 0), None),
        ((8, 0), (99, 9), None, None),
    ],
)
def test_capability_is_held_against_both_ends(
    low: tuple[int, int],
    high: tuple[int, int],
    has: tuple[int, int] | None,
    reason: str | None,
) -> None:
    assert engine(low=low, high=high).why_not_here("cuda", has) == reason


def test_claims_hold_for_the_options_they_depend_on() -> None:
    always = Claim(Property.BATCH_INVARIANT, "the manual")
    only = Claim(Property.BACKWARD_DETERMINISTIC, "the manual", when={"splits": "1"})
    made = Engine("s", "d", (), "i", {}, claims=(always, only))
    assert made.claims_of({}) == [always]
    assert made.claims_of({"splits": "2"}) == [always]
    assert made.claims_of({"splits": "1", "x": ""}) == [always, only]


def test_options_are_combined_in_order() -> None:
    assert options_for(a=("1", "2"), b=("x", "")) == (
        (("a", "1"), ("b", "x")),
        (("a", "1"), ("b", "")),
        (("a", "2"), ("b", "x")),
        (("a", "2"), ("b", "")),
    )


@pytest.mark.parametrize("engine_id", discover.engines())
def test_every_engine_says_how_to_get_it_and_where_its_claims_stand(engine_id: str) -> None:
    made = discover.engines()[engine_id].engine
    assert made.summary and made.distribution and made.modules and "install" in made.install
    assert all(claim.source for claim in made.claims)
    assert made.modules[0] == "torch"
