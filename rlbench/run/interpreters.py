"""The interpreters that the user names: `--env NAME=PYTHON`, or a file of them, `--envs FILE`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbench import discover
from rlbench.envs import toml
from rlbench.errors import UsageError
from rlbench.plan import LOCAL

KEYS = ("python", "engines")


@dataclass(frozen=True)
class Interpreter:
    """A Python that can measure, under the name its environment has in reports."""

    name: str
    python: str
    engines: tuple[str, ...] = ()
    """Engine ids to run there and nowhere else; empty: whatever it can run."""


def from_options(options: Iterable[str]) -> list[Interpreter]:
    """`NAME=PYTHON` options. Raises UsageError for anything else."""
    found = []
    for text in options:
        name, _, python = text.partition("=")
        if not name or not python:
            raise UsageError(
                f"--env: {text!r} is not NAME=PYTHON, such as vllm=/path/to/venv/bin/python"
            )
        found.append(Interpreter(name, _executable(f"--env {name}", python, Path())))
    return found


def from_file(path: Path) -> list[Interpreter]:
    """A TOML file with a table for each environment: `python`, and `engines` if it should say.

    A relative `python` is one beside the file. Raises UsageError, naming the file and the table.
    """
    tables = toml.tables(f"--envs {path}", path)
    return [_from_table(path, name, table) for name, table in tables.items()]


def _from_table(path: Path, name: str, table: Any) -> Interpreter:
    where = f"--envs {path}: [{name}]"
    if not isinstance(table, dict) or not isinstance(table.get("python"), str):
        raise UsageError(f'{where} needs python = "/path/to/python"')
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise UsageError(f"{where} has {', '.join(unknown)}; known are {', '.join(KEYS)}")
    engines = table.get("engines", [])
    if not isinstance(engines, list) or not all(isinstance(word, str) for word in engines):
        raise UsageError(f'{where} engines should be a list, such as ["fa3*", "vllm-triton"]')
    return Interpreter(
        name,
        _executable(where, table["python"], path.parent),
        tuple(discover.select(f"{where} engines", engines)),
    )


def _executable(where: str, python: str, folder: Path) -> str:
    """The path of an interpreter. Not resolved: a virtual environment's python is a link."""
    expanded = Path(python).expanduser()
    candidate = folder / expanded if len(expanded.parts) > 1 else expanded
    found = shutil.which(candidate)
    if found is None:
        raise UsageError(f"{where}: {python!r} is not an executable file")
    return str(Path(found).absolute())


def together(named: Sequence[Interpreter]) -> list[Interpreter]:
    """rlbench's own interpreter and the named ones. Raises UsageError for a name used twice."""
    names = [LOCAL]
    for interpreter in named:
        if interpreter.name in names:
            own = interpreter.name == LOCAL
            taken = "that of rlbench's own interpreter" if own else "used twice"
            raise UsageError(f"--env {interpreter.name}: the name is {taken}; choose another")
        names.append(interpreter.name)
    return [Interpreter(LOCAL, sys.executable), *named]
