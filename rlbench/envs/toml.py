"""Reading TOML files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from rlbench.errors import UsageError


def tables(where: str, path: Path) -> dict[str, Any]:
    """What the file holds. Raises UsageError, beginning with `where`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise UsageError(f"{where}: cannot be read: {why}") from None
    return parse(where, text)


def parse(where: str, text: str) -> dict[str, Any]:
    """What the text says. Raises UsageError, beginning with `where`."""
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as why:
        raise UsageError(f"{where}: is not TOML: {why}") from None
    return found
