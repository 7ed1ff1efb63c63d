"""`rlbench env check`: what imports where, tried in every environment for real."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import interpreters
import pytest
from harness import Done, Rlbench

from rlbench.run.imports import try_import

ENGINE = """
from rlbench.engines._engine import Engine
ENGINE = Engine(
    summary="", distribution="thing", modules=("torch", "thing", "thing_kernels"),
    install="pip install thing", load={"attention": print}, variants=((), (("fast", ""),)),
)
"""
SYMBOL = "/srv/someone/env/lib/python3.12/site-packages/thing/_C.abi3.so: undefined symbol: _ZN3c10"
KERNELS = {
    "good": "print('an open line', end='')",
    "broken": f"raise ImportError({SYMBOL!r} + chr(27) + '[31m' + chr(10) + 'too bad')",
    "dies": "import os, sys; print('last words', file=sys.stderr, flush=True); os._exit(7)",
    "hides": "try:\n import no_such_c\nexcept ImportError as e: raise ImportError('no GPU?') from e",
    "leaves": "raise SystemExit('bye')",
}


@pytest.fixture(scope="module")
def rlbench(tmp_path_factory: pytest.TempPathFactory) -> Rlbench:
    """`rlbench` in a folder of environments: its own without torch, others with a stand-in."""
    folder = tmp_path_factory.mktemp("environments")
    try:
        own = interpreters.make(folder / "own", ["typer", "rich", "pydantic"], rlbench=True)
    except LookupError as why:
        pytest.skip(f"no interpreter without torch: {why}")
    (folder / "plugin").mkdir()
    interpreters.package(folder / "plugin", "rlbench-thing", "1", rlbench_thing=ENGINE)
    (points,) = folder.glob("plugin/*.dist-info")
    (points / "entry_points.txt").write_text("[rlbench.engines]\nthing = rlbench_thing\n")
    for name, kernels in {**KERNELS, "half": None}.items():
        _, site = interpreters.bare(folder / name)
        torch = "raise OSError('libcudart.so.13: no such file')" if name == "leaves" else ""
        interpreters.package(site, "torch", "9.0", torch=torch or interpreters.TORCH)
        interpreters.package(site, "thing", f"1.{name}", thing="")
        if kernels:
            (site / "thing_kernels.py").write_text(kernels)
    (folder / "envs.toml").write_text(
        '[good]\npython = "good/bin/python"\nengines = ["thing*"]\n'
        '[broken]\npython = "broken/bin/python"\n'
    )
    return Rlbench(folder, own, {"PYTHONPATH": str(folder / "plugin")})


@pytest.fixture(scope="module")
def checked(rlbench: Rlbench) -> Done:
    more = [f"--env={name}={name}/bin/python" for name in ("dies", "hides", "leaves", "half")]
    return rlbench("env", "check", "--envs", "envs.toml", *more, code=0)


def rows(done: Done, name: str) -> list[list[str]]:
    lines = [line for line in done.out.splitlines() if line.startswith(f"{name}  ")]
    return [re.split(r"  +", line.strip())[1:] for line in lines]


def row(done: Done, name: str) -> list[str]:
    (one,) = rows(done, name)
    return one


def test_table_says_what_an_environment_is(checked: Done) -> None:
    names = checked.out.splitlines()[0].split()
    assert names == ["local", "good", "broken", "dies", "hides", "leaves", "half"]
    version = f"{sys.version_info[0]}.{sys.version_info[1]}."
    assert all(cell.startswith(version) for cell in row(checked, "python"))
    package, engine = rows(checked, "torch")  # packages come first
    assert package == ["not installed", *["9.0"] * 4, "9.0 fails", "9.0"]
    assert engine == row(checked, "torch-eager")


def test_engine_has_its_version_or_a_word_in_every_environment(checked: Done) -> None:
    assert row(checked, "thing") == ["–", "1.good", *["fails"] * 4, "incomplete"]
    assert row(checked, "torch-eager") == ["–", *["9.0"] * 4, "fails", "9.0"]
    assert row(checked, "fa4") == ["–"] * 7


def test_every_failure_has_its_reason_without_folders_and_escapes(checked: Done) -> None:
    lines = {line.split(": ")[0]: line.partition(": ")[2] for line in checked.out.splitlines()}
    assert lines["thing in broken"] == (
        "ImportError: thing/_C.abi3.so: undefined symbol: _ZN3c10[31m too bad"
    )
    assert lines["thing in dies"] == "the import ended with exit code 7: last words"
    assert lines["thing in hides"] == (
        "ImportError: no GPU? (because of ModuleNotFoundError: No module named 'no_such_c')"
    )
    assert lines["thing in leaves"] == "OSError: libcudart.so.13: no such file"
    assert lines["thing in half"] == (
        "thing 1.half is installed, but module thing_kernels is not there"
    )
    assert "\x1b" not in checked.out
    assert "srv" not in checked.out


def test_what_is_nowhere_has_the_command_that_brings_it(checked: Done) -> None:
    line = re.compile(r"^nowhere: .*fa4.*; to get: rlbench env create flash$", re.MULTILINE)
    assert line.search(checked.out)
    assert not re.search(r"nowhere: .*thing", checked.out)


def test_engine_that_does_not_import_where_it_is_told_to_run_ends_with_3(rlbench: Rlbench) -> None:
    told = '[{0}]\npython = "{0}/bin/python"\nengines = ["thing:fast"]\n'
    for name, code in (("good", 0), ("broken", 3), ("half", 3)):
        (rlbench.folder / f"{name}.toml").write_text(told.format(name))
        rlbench("env", "check", "--envs", f"{name}.toml", code=code)


def test_what_cannot_be_asked_is_refused(rlbench: Rlbench) -> None:
    for option in ("a", "a=/no/such/python", "a=/bin/false", "local=python3"):
        done = rlbench("env", "check", "--env", option, code=2)
        assert done.out == ""
        assert len(done.err.splitlines()) == 1


def test_import_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "endless.py").write_text("import signal; signal.pause()")
    reason = try_import(sys.executable, ["endless"], timeout_s=0.5)
    assert reason == "the import did not end within 0.5 s"


def test_import_that_segfaults_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "segv.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    reason = try_import(sys.executable, ["json", "segv"], timeout_s=60.0)
    assert reason == "the import was killed by SIGSEGV: it said nothing"
    assert try_import(sys.executable, ["json", "csv"], timeout_s=60.0) is None
