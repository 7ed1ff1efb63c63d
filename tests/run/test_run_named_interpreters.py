"""Interpreters by option and by file: what is accepted, and a clear line for what is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlbench.errors import UsageError
from rlbench.run.interpreters import Interpreter, from_file, from_options, together


def written(folder: Path, text: str) -> Path:
    path = folder / "envs.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_gives_names_interpreters_and_engines(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f'[flash]\npython = "{sys.executable}"\nengines = ["fa4*", "torch-eager"]\n'
        f'[vllm]\npython = "{sys.executable}"\n',
    )
    assert from_file(path) == [
        Interpreter("flash", sys.executable, ("fa4", "fa4:deterministic", "torch-eager")),
        Interpreter("vllm", sys.executable),
    ]


def test_relative_interpreter_is_beside_the_file_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    link = tmp_path / "venv" / "bin" / "python"
    link.symlink_to(sys.executable)
    (found,) = from_file(written(tmp_path, '[a]\npython = "venv/bin/python"\n'))
    assert found.python == str(link)


WRONG = {
    "no TOML": ("[a", "is not TOML"),
    "no table": ("a = 1", "[a] needs python"),
    "no python": ("[a]\nengines = []", "[a] needs python"),
    "another key": (f'[a]\npython = "{sys.executable}"\nengine = "fa4"', "[a] has engine; known"),
    "engines no list": (f'[a]\npython = "{sys.executable}"\nengines = "fa4"', "should be a list"),
    "unknown engine": (
        f'[a]\npython = "{sys.executable}"\nengines = ["fa5"]',
        "'fa5' is not known",
    ),
    "no interpreter": ('[a]\npython = "/nowhere/python"', "'/nowhere/python' is not an executable"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_file_is_one_line_that_names_file_and_table(what: str, tmp_path: Path) -> None:
    text, reason = WRONG[what]
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        from_file(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value).rstrip() or what == "no TOML"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"envs\.toml: cannot be read"):
        from_file(tmp_path / "envs.toml")


@pytest.mark.parametrize("name", ["local", "a"])
def test_name_can_be_used_once(name: str) -> None:
    named = [Interpreter("a", sys.executable), Interpreter(name, sys.executable)]
    with pytest.raises(UsageError, match=f"--env {name}: the name is"):
        together(named)


def test_own_interpreter_comes_first() -> None:
    named = from_options([f"a={sys.executable}"])
    assert [i.name for i in together(named)] == ["local", "a"]
