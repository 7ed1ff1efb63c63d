"""Adding an environment to the file that `--envs` reads, whose other lines stay as they are."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from rlbench.envs import toml
from rlbench.errors import BuildError, UsageError

HEAD = "# Interpreters that rlbench runs engines in: rlbench attention --envs {name}\n"


def check(path: Path) -> None:
    """Fail before a long build instead of after. Raises UsageError for what cannot be added to."""
    if path.exists():
        toml.tables(f"--envs {path}", path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--envs {path}: cannot be written")


def add(path: Path, name: str, python: Path, engines: Sequence[str]) -> bool:
    """Append the environment's table. False if the file has one of that name, which then stays.

    Raises UsageError if the file cannot be read, BuildError if it cannot be written.
    """
    where = f"--envs {path}"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    if name in toml.parse(where, earlier):
        return False
    gap = "" if earlier.endswith("\n") or not earlier else "\n"
    head = "" if earlier else HEAD.format(name=path.name)
    entry = f"{gap}{head}\n{table(name, _from(path.parent, python), engines)}"
    toml.parse(where, earlier + entry)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(entry)
    except OSError as why:
        raise BuildError(f"{where}: cannot be written: {why}; it should have:\n{entry}") from None
    return True


def table(name: str, python: str, engines: Sequence[str]) -> str:
    """An environment as TOML, whose strings with these escapes are those of JSON."""
    lines = [f"[{name}]", f"python = {_text(python)}"]
    if engines:
        lines.append(f"engines = [{', '.join(map(_text, engines))}]")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _from(folder: Path, python: Path) -> str:
    """The interpreter as seen from the folder of the file, if it is inside that."""
    python, folder = Path(os.path.abspath(python)), Path(os.path.abspath(folder))  # noqa: PTH100
    return str(python.relative_to(folder) if python.is_relative_to(folder) else python)
