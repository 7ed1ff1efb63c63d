"""Files that are whole or not there. Standard library only: workers write with it, too."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write the parts to a file beside `path`, then put it in its place. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_remains(path: Path) -> None:
    """Remove what a process that was killed while it wrote `path` has left beside it."""
    for entry in list(path.parent.iterdir()):
        if entry.name.startswith(_prefix(path)):
            entry.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
