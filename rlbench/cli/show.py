"""`rlbench show`: a report as tables."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlbench.errors import UsageError

if TYPE_CHECKING:
    from rlbench.differences import Differences
    from rlbench.results.schema import Report


class Format(str, Enum):
    """How to show a report."""

    table = "table"
    markdown = "markdown"
    csv = "csv"


def show(
    report: Annotated[Path, typer.Argument(help="Report file.")],
    format_: Annotated[
        Format, typer.Option("--format", "-f", help="For the terminal, a page, a spreadsheet.")
    ] = Format.table,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="Which engines gave the same bits, instead.")
    ] = False,
    outputs: Annotated[
        list[Path],
        typer.Option(
            "--outputs", metavar="DIR", help="What --save-outputs saved: how far the others are."
        ),
    ] = [],  # noqa: B006  # typer copies it
) -> None:
    """Show a report's comparison tables."""
    from rlbench.results.store import load

    if format_ is Format.csv and (agreement or outputs):
        raise UsageError("--format csv: has no agreement; table and markdown have")
    if outputs and format_ is Format.table and not agreement:
        raise UsageError("--outputs: is compared by --agreement, or in --format markdown")
    loaded = load(report)
    differences = compare(loaded, outputs) if outputs else None
    if format_ is Format.table:
        from rich.console import Console

        from rlbench.render import table

        if agreement:
            table.agreement(loaded, Console(), differences)
        else:
            table.show(loaded, Console())
    elif format_ is Format.markdown:
        from rlbench.render import markdown

        page = markdown.agreement if agreement else markdown.render
        typer.echo(page(loaded, differences), nl=False)
    else:
        from rlbench.render import csv

        typer.echo(csv.render(loaded), nl=False)


def compare(report: Report, outputs: list[Path]) -> Differences:
    """How far apart the saved outputs are; what was not taken of them is said."""
    from rlbench.differences import measure
    from rlbench.render.view import clean

    differences = measure(report, outputs)
    for line in differences.refused:
        typer.echo(f"rlbench: {clean(line)}", err=True)
    return differences
