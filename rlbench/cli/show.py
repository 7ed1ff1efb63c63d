"""`rlbench show`: a report as tables."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rlbench.errors import UsageError


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
) -> None:
    """Show a report's comparison tables."""
    from rlbench.results.store import load

    loaded = load(report)
    if agreement and format_ is not Format.table:
        raise UsageError("--agreement: is a view of its own; Markdown has it in any case")
    if format_ is Format.table:
        from rich.console import Console

        from rlbench.render import table

        (table.agreement if agreement else table.show)(loaded, Console())
    elif format_ is Format.markdown:
        from rlbench.render import markdown

        typer.echo(markdown.render(loaded), nl=False)
    else:
        from rlbench.render import csv

        typer.echo(csv.render(loaded), nl=False)
