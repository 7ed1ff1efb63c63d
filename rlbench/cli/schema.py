"""`rlbench schema`: the report's JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def schema(
    check: Annotated[
        Path | None, typer.Option("--check", help="Say whether this report fits, instead.")
    ] = None,
) -> None:
    """Print the report's JSON Schema, or check a report against it."""
    from rlbench.results.schema import Report

    if check is not None:
        from rlbench.results.store import load

        report = load(check)
        typer.echo(f"{check}: valid {report.schema_} with {len(report.results)} results")
        return
    typer.echo(json.dumps(Report.model_json_schema(by_alias=True), indent=1))
