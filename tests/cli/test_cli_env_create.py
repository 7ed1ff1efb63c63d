"""`rlbench env create`: built with uv and listed, or nothing is left of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Rlbench, alive

from rlbench.envs.groups import groups
from rlbench.run.interpreters import from_file

UV = Path(__file__).parents[1] / "fake" / "uv"
HOME = ".rlbench/envs/vllm"


@pytest.fixture
def rlbench(tmp_path: Path) -> Rlbench:
    """`rlbench` in an empty folder, with a stand-in for uv on its path."""
    work, tools = tmp_path / "work", tmp_path / "tools"
    work.mkdir()
    tools.mkdir()
    (tools / "uv").symlink_to(UV)
    (tools / "python3").symlink_to(sys.executable)
    path = {"PATH": f"{tools}:{os.defpath}", "FAKE_UV_LOG": str(tmp_path / "log")}
    return Rlbench(work, extra=path)


def asked(rlbench: Rlbench) -> list[list[str]]:
    """What uv was called with."""
    log = Path(rlbench.extra["FAKE_UV_LOG"])
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def refused(rlbench: Rlbench, *arguments: str) -> str:
    """The one line of a command that was refused before uv was called."""
    before = asked(rlbench)
    done = rlbench("env", "create", *arguments, code=2)
    assert asked(rlbench) == before
    (line,) = done.err.splitlines()
    return line


def nothing_is_left(rlbench: Rlbench) -> bool:
    return not any(path.is_file() for path in rlbench.folder.rglob("*"))


def test_builds_a_group_and_lists_it(rlbench: Rlbench) -> None:
    done = rlbench("env", "create", "vllm", code=0)
    python = rlbench.folder / HOME / "bin" / "python"
    (listed,) = from_file(rlbench.folder / "envs.toml")
    assert (listed.name, listed.python) == ("vllm", str(python))
    assert {"fa2", "fa2:splits=1", "fa3"} <= set(listed.engines)
    venv, install = asked(rlbench)
    assert venv[0] == "venv"
    assert venv[venv.index("--python") + 1] == groups()["vllm"].python
    assert install[:2] == ["pip", "install"]
    assert install[-3:] == list(groups()["vllm"].pins)
    assert "uv says what it does" in done.err
    assert "uv says" not in done.out
    assert f"built {HOME}" in done.out
    assert "rlbench attention --envs envs.toml" in done.out
    assert [p.name for p in python.parents[2].iterdir()] == ["vllm"]


def test_several_groups_go_where_they_are_told(rlbench: Rlbench) -> None:
    (rlbench.folder / "mine.toml").write_text("# mine\n")
    more = ("--into", "homes", "--envs", "mine.toml", "--python", "3.13")
    done = rlbench("env", "create", "vllm", "train", *more, code=0)
    listed = from_file(rlbench.folder / "mine.toml")
    homes = rlbench.folder / "homes"
    assert [i.python for i in listed] == [str(homes / n / "bin/python") for n in ("vllm", "train")]
    assert (rlbench.folder / "mine.toml").read_text().startswith("# mine\n")
    venv, *others = asked(rlbench)
    assert venv[venv.index("--python") + 1] == "3.13"
    assert len(others) == 1 + 3
    assert "is compiled" in done.err


def test_what_is_there_already_is_not_built_again(rlbench: Rlbench) -> None:
    rlbench("env", "create", "vllm", code=0)
    before = asked(rlbench)
    (rlbench.folder / "envs.toml").unlink()
    done = rlbench("env", "create", "vllm", code=0)
    assert asked(rlbench) == before
    assert "is there already" in done.out
    assert [i.name for i in from_file(rlbench.folder / "envs.toml")] == ["vllm"]
    done = rlbench("env", "create", "vllm", code=0)
    assert "has [vllm] already, which stays as it is" in done.out


def test_other_pins_are_replaced_only_when_told(rlbench: Rlbench) -> None:
    rlbench("env", "create", "vllm", code=0)
    record = rlbench.folder / HOME / "rlbench-pins.txt"
    record.write_text("vllm==0.1\n")
    assert "--force" in refused(rlbench, "vllm")
    rlbench("env", "create", "vllm", "--force", code=4, FAKE_UV="fail")
    assert record.read_text() == "vllm==0.1\n"
    rlbench("env", "create", "vllm", "--force", code=0)
    assert record.read_text().splitlines() == list(groups()["vllm"].pins)


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_what_is_no_environment_is_never_replaced(force: tuple[str, ...], rlbench: Rlbench) -> None:
    mine = rlbench.folder / HOME / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert HOME in refused(rlbench, "vllm", *force)
    assert mine.read_text() == "mine"


def test_replacing_a_link_to_an_environment_leaves_that(rlbench: Rlbench, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyvenv.cfg").write_text("")
    (rlbench.folder / HOME).parent.mkdir(parents=True)
    (rlbench.folder / HOME).symlink_to(other)
    rlbench("env", "create", "vllm", "--force", code=0)
    assert (other / "pyvenv.cfg").exists()
    assert not (rlbench.folder / HOME).is_symlink()


def test_uv_that_fails_leaves_nothing(rlbench: Rlbench) -> None:
    done = rlbench("env", "create", "vllm", code=4, FAKE_UV="fail")
    assert "no such version" in done.err
    assert "uv ended with exit code 3" in done.err.splitlines()[-1]
    assert nothing_is_left(rlbench)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_nothing_and_nobody(number: signal.Signals, rlbench: Rlbench) -> None:
    started = rlbench.start("env", "create", "vllm", FAKE_UV="hang")
    for _ in started.lines_until("hanging"):
        pass
    started.process.send_signal(number)
    done = rlbench.finish(started, code=130)
    assert alive(done.mark) == []
    assert nothing_is_left(rlbench)


def test_what_a_killed_one_leaves_is_not_taken_for_good(rlbench: Rlbench) -> None:
    started = rlbench.start("env", "create", "vllm", FAKE_UV="hang")
    for _ in started.lines_until("hanging"):
        pass
    # Its uv, which is in a session of its own, first: it must not outlive the test.
    for pid in alive(started.mark, patience_s=0.0):
        if pid != started.process.pid:
            os.kill(pid, signal.SIGSTOP)
    started.process.kill()
    for pid in alive(started.mark, patience_s=0.0):
        os.kill(pid, signal.SIGKILL)
    rlbench.finish(started)
    assert not (rlbench.folder / HOME).exists()
    assert not (rlbench.folder / "envs.toml").exists()
    assert not nothing_is_left(rlbench)
    rlbench("env", "create", "vllm", code=0)
    assert [p.name for p in (rlbench.folder / HOME).parent.iterdir()] == ["vllm"]


def test_without_uv_it_says_how_to_get_it(rlbench: Rlbench, tmp_path: Path) -> None:
    if shutil.which("uv", path=str(Path(sys.executable).parent)):
        pytest.skip("uv is installed beside this Python")
    (tmp_path / "empty").mkdir()
    line = refused(
        replace(rlbench, extra={**rlbench.extra, "PATH": str(tmp_path / "empty")}), "vllm"
    )
    assert "uv" in line
    assert "pip install uv" in line
    assert nothing_is_left(rlbench)


def test_unknown_group_is_refused(rlbench: Rlbench) -> None:
    line = refused(rlbench, "flsh")
    assert "Did you mean 'flash'?" in line
    assert "sglang, train, vllm" in line


def test_file_that_cannot_be_added_to_is_refused_before_anything_is_built(rlbench: Rlbench) -> None:
    (rlbench.folder / "envs.toml").write_text("[vllm")
    assert "envs.toml: is not TOML" in refused(rlbench, "vllm")
    assert "no/envs.toml" in refused(rlbench, "vllm", "--envs", "no/envs.toml")


def test_place_that_cannot_be_made_is_refused(rlbench: Rlbench) -> None:
    (rlbench.folder / "file").write_text("")
    assert "cannot write in file" in refused(rlbench, "vllm", "--into", "file")
