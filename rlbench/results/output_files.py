"""Where saved outputs are: one file for each (op, case, engine, environment), in one folder.

Standard library only: the parent names the files, workers write them, `rlbench show` finds them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from rlbench.errors import UsageError

ENDING = ".safetensors"
_KEPT = "="
_BETWEEN = "+"
"""Stands in no part of a name: `quote` escapes it."""
_LONGEST = 240
"""Bytes of a file's name: 255 is what file systems take, and a name in the making is longer."""


def file_name(op: str, case: str, engine: str, environment: str) -> str:
    """`attention+tiny+fa3%3Asplits=1+local-….safetensors`: ASCII, no `/`, no `:`, invertible."""
    parts = (op, case, engine, environment)
    return _BETWEEN.join(quote(p, safe=_KEPT, errors="surrogatepass") for p in parts) + ENDING


def parts_of(name: str) -> tuple[str, ...]:
    """(op, case, engine, environment) of a file name that `file_name` made."""
    parts = name.removesuffix(ENDING).split(_BETWEEN)
    return tuple(unquote(part, errors="surrogatepass") for part in parts)


def prepare(folder: Path, names: Iterable[str]) -> None:
    """Make the folder if there is none. Raises UsageError if these files cannot be saved in it."""
    for name in names:
        if len(os.fsencode(name)) > _LONGEST:
            raise UsageError(f"--save-outputs: {name} is too long for a file's name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--save-outputs: {folder} is not a directory") from None
    except OSError as why:
        raise UsageError(f"--save-outputs: cannot write in {folder}: {why.strerror}") from None
