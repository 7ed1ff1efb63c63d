"""Turning options into objects, with a clear error for each that cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlbench import __version__
from rlbench.errors import UsageError

if TYPE_CHECKING:
    from rlbench.results.schema import Report
    from rlbench.run.recorder import Recorder

COMMIT = "RLBENCH_COMMIT"


def check_device(device: str) -> None:
    """Raises UsageError unless it is `auto`, `cpu` or `cuda:N`."""
    if not re.fullmatch(r"auto|cpu|cuda:\d+", device):
        raise UsageError(f"--device: {device!r} is not known. Known: cpu, cuda:0, cuda:1, …, auto.")


def load_reports(paths: Sequence[Path]) -> list[tuple[str, Report]]:
    """Reports with their names. Raises ReportError for one that cannot be read."""
    from rlbench.results.store import load

    return [(str(path), load(path)) for path in paths]


def open_output(path: Path, *, resume: bool) -> Report | None:
    """Make sure that the report can be written; with `resume`, read what it has."""
    from rlbench.results.store import check_writable, load

    check_writable(path)
    return load(path) if resume and path.exists() else None


def set_aside(path: Path) -> None:
    """Keep an earlier report of the same name under another one, and say so."""
    from rlbench.results.store import keep_earlier

    kept = keep_earlier(path)
    if kept:
        typer.echo(f"{path} exists already; the earlier report is now {kept}", err=True)


def recorder(path: Path, preset: str, resumed: Report | None) -> Recorder:
    """The growing report of this run."""
    from rlbench.run.clock import now
    from rlbench.run.recorder import Recorder

    argv = ["rlbench", *(without_folders(word) for word in sys.argv[1:])]
    return Recorder(path, {"created": now(), "argv": argv, "rlbench": version()}, preset, resumed)


def without_folders(word: str) -> str:
    """An argument without the folders of this machine: they are nobody's business."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if "/" in value else word


def version() -> dict[str, str | bool | None]:
    """This rlbench's version, and its git commit if it runs from a source tree.

    RLBENCH_COMMIT names the commit of a tree that has travelled without its history, or beside
    another one: it is believed.
    """
    told = os.environ.get(COMMIT)
    tree = Path(__file__).resolve().parents[2]
    commit = None if told or not (tree / ".git").exists() else _git(tree, "rev-parse", "HEAD")
    if commit is None:
        return {"version": __version__, "commit": told, "dirty": None}
    changes = _git(tree, "status", "--porcelain", "--", "rlbench")
    return {
        "version": __version__,
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
    }


def _git(tree: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
