"""Building a group's environment with uv."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rlbench.envs.groups import Group
from rlbench.errors import BuildError, UsageError

RECORD = "rlbench-pins.txt"
"""File in a finished environment: the requirements it was built from, one a line."""

NO_UV = (
    "env create: uv, which builds environments, is not here; to get it: pip install uv, or see "
    "https://docs.astral.sh/uv/getting-started/installation/"
)


def find_uv() -> str:
    """The path of uv: on PATH or beside this Python. Raises UsageError where there is none."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("uv") or shutil.which("uv", path=beside)
    if found is None:
        raise UsageError(NO_UV)
    return found


def interpreter(environment: Path) -> Path:
    """The Python of an environment."""
    return environment / "bin" / "python"


def is_built(group: Group, environment: Path, *, force: bool) -> bool:
    """Whether the environment is there with the group's pins already.

    Raises UsageError if something else is in its place, and `force` does not say to replace it or
    cannot, because it is no environment.
    """
    if not os.path.lexists(environment):
        return False
    if not (environment / "pyvenv.cfg").is_file():
        raise UsageError(
            f"env create: {environment} exists and is no environment; remove it or use --into"
        )
    if force:
        return False
    record = environment / RECORD
    if record.is_file() and record.read_text(encoding="utf-8") == _recorded(group):
        return True
    raise UsageError(
        f"env create: {environment} exists and was not built from the pins of {group.name}; "
        "--force builds it anew, --into puts it elsewhere"
    )


def build(uv: str, group: Group, environment: Path, python: str | None = None) -> None:
    """Build the environment; uv says on standard error what it does.

    python: its version or path, if it should be another than the one the pins were tested with.

    It is built beside its place and moved there when it is whole, so that what an interruption
    leaves is never taken for good; an environment that it replaces is kept until then. Raises
    UsageError if there is no place for it, BuildError if building fails.
    """
    unfinished = _room_for(environment)
    try:
        for command in commands(uv, group, unfinished, python or group.python):
            _run(command, _variables(group))
        (unfinished / RECORD).write_text(_recorded(group), encoding="utf-8")
        _remove(environment)
        unfinished.rename(environment)
    except OSError as why:
        raise BuildError(f"env create: {environment} cannot be built: {why}") from why
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _room_for(environment: Path) -> Path:
    """Where to build an environment; what an earlier interruption left there is gone."""
    unfinished = environment.with_name(f"{environment.name}.unfinished")
    try:
        environment.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
    except OSError as why:
        raise UsageError(f"env create: cannot write in {environment.parent}: {why}") from None
    return unfinished


def commands(uv: str, group: Group, environment: Path, python: str) -> list[list[str]]:
    """What uv is asked to do, in order."""
    install = [uv, "pip", "install", "--python", str(interpreter(environment))]
    venv = [uv, "venv", "--quiet", "--no-project", "--relocatable", "--python", python]
    asked = [[*venv, str(environment)]]
    if group.compiled:
        asked.append([*install, *group.everywhere, *group.compiled.needs])
        for package in group.compiled.packages:
            install += ["--no-build-isolation-package", package]
    return [*asked, [*install, *group.pins]]


def _variables(group: Group) -> dict[str, str]:
    extra: Mapping[str, str] = group.compiled.variables if group.compiled else {}
    return {**extra, **os.environ}


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    """Raises BuildError if the command fails; whatever happens, none of its processes lives on."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=variables, start_new_session=True
    )
    try:
        code = process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code:
        asked = "uv " + " ".join(command[1:])
        raise BuildError(f"env create: nothing was built; uv ended with exit code {code}: {asked}")


def _recorded(group: Group) -> str:
    return "".join(f"{pin}\n" for pin in group.pins)


def _remove(environment: Path) -> None:
    """Remove an environment if it is there; of a link to one, the link alone."""
    if environment.is_symlink():
        environment.unlink()
    elif environment.exists():
        shutil.rmtree(environment)
