"""`rlbench merge`: several reports -> one."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class OnConflict(str, Enum):
    """What to do with two different answers to one question."""

    error = "error"
    newest = "newest"


def merge(
    reports: Annotated[
        list[Path], typer.Argument(help="Report files; their order is of no matter.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Report file to write.")],
    on_conflict: Annotated[
        OnConflict, typer.Option(help="Two different answers to one question: stop, or keep which.")
    ] = OnConflict.error,
) -> None:
    """Merge reports, from other environments or of other engines, into one."""
    from rlbench.cli.options import load_reports, set_aside
    from rlbench.merge import merge as fold
    from rlbench.results.store import check_writable, save

    check_writable(out)
    merged = fold(load_reports(reports), newest=on_conflict is OnConflict.newest)
    if out not in reports:
        set_aside(out)
    save(merged, out)
    typer.echo(f"{out}: {len(merged.results)} results from {len(reports)} reports")
