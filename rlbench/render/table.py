"""The report in a terminal: two short tables a case, and what there is to know under them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rlbench.render import cells, pricing, sameness, view
from rlbench.results.schema import Report

if TYPE_CHECKING:
    from rlbench.differences import Differences


def show(report: Report, console: Console) -> None:
    """Print every case of the report."""
    for sheet in view.sheets(report):
        several = view.twice(sheet)
        rows = view.present(sheet).rows
        console.print()
        console.print(Text(heading(sheet), style="bold"))
        if any(scenario in row.results for row in rows for scenario in view.INVARIANCE):
            console.print(verdicts(rows, several))
        if any(s in row.results for row in rows for s in ("accuracy", "latency")):
            console.print(price_table(report, sheet, rows, several))
            _legend(report, sheet, console)
        _notes(sheet, console)
    _claims(report, console)


def agreement(report: Report, console: Console, differences: Differences | None = None) -> None:
    """Print, for every output of every case, which engines gave the same bits.

    With differences, also how far apart those are that did not.
    """
    for sheet in view.sheets(report):
        console.print()
        console.print(Text(heading(sheet), style="bold"))
        if differences:
            console.print(Text(cells.HOW_TO_READ_DIFFERENCES, style="dim"))
        for tensor, groups in sameness.agreement(sheet).items():
            console.print(Text(view.clean(tensor)))
            matrix = sameness.matrix(groups, differences)
            if matrix:
                _matrix(matrix, console)
            else:
                _groups(groups, console)
        unsaved = sameness.unsaved(sheet, differences)
        if unsaved:
            console.print(Text(view.clean(f"no saved outputs: {', '.join(unsaved)}"), "yellow"))


def _groups(groups: Sequence[sameness.Group], console: Console) -> None:
    for group in groups:
        if len(group.engines) > 1:
            _indented(" = ".join(group.engines), "", console)
    alone = ", ".join(group.engines[0] for group in groups if len(group.engines) == 1)
    if alone:
        _indented(f"each its own: {alone}", "dim", console)


def _indented(text: str, style: str, console: Console) -> None:
    console.print(Padding(Text(view.clean(text), style=style), (0, 0, 0, 2)))


def _matrix(matrix: sameness.Matrix, console: Console) -> None:
    """The groups by number, and under them the matrix, in as many blocks as the width asks for."""
    names = [str(i + 1) for i in range(len(matrix.groups))]
    for name, group in zip(names, matrix.groups, strict=True):
        _indented(f"{name:>{len(names[-1])}}: {' = '.join(group.engines)}", "", console)
    for group in matrix.unsaved:
        _indented(f"no saved tensor: {' = '.join(group.engines)}", "dim", console)
    label = len(names[-1]) + 2
    cell = max(len(text) for row in [names, *matrix.cells] for text in row) + 1
    columns = max(1, (console.width - label) // cell)
    for begin in range(0, len(names), columns):
        shown = slice(begin, begin + columns)
        console.print(Text(" " * label + "".join(n.rjust(cell) for n in names[shown]), "dim"))
        for name, row in zip(names, matrix.cells, strict=True):
            line = Text(name.rjust(label), "dim")
            console.print(line.append("".join(c.rjust(cell) for c in row[shown]), "not dim"))


def heading(sheet: view.Sheet) -> str:
    """`attention · qwen3-next · bf16 · q_heads 16 · …`."""
    words = [sheet.op, sheet.case_id]
    if sheet.case:
        words.append(sheet.case.dtype)
        shown = {k: v for k, v in sheet.case.params.items() if k != "seed"}
        words += [f"{name} {value}" for name, value in shown.items()]
    return view.clean(" · ".join(words))


def verdicts(rows: list[view.Row], several: bool) -> Table:
    """Engines down, invariance scenarios across."""
    table = _table("same bits?", several)
    shown = [s for s in view.INVARIANCE if any(s in row.results for row in rows)]
    for scenario in shown:
        table.add_column(scenario.replace("chunked-prefill", "chunked"), no_wrap=True)
    for row in rows:
        results = [row.result(scenario) for scenario in shown]
        if any(results):
            words = [Text(cells.verdict(r), cells.style(r)) for r in results]
            table.add_row(*_who(row, several), *words)
    return table


def price_table(report: Report, sheet: view.Sheet, rows: list[view.Row], several: bool) -> Table:
    """Engines down; the error beside plain torch's, and the latency of one shape a pass."""
    table = _table("at what price?", several)
    table.add_column("error\n× torch", justify="right", no_wrap=True)
    columns = []
    for pass_, shape in view.headline(sheet):
        title = Text(view.clean(f"{pass_} {shape}") + "\n× fastest")
        table.add_column(title, justify="right", no_wrap=True)
        columns.append(pricing.prices(report, sheet, pass_, shape))
    for row in rows:
        if "accuracy" in row.results or "latency" in row.results:
            found = [prices.get((row.engine, row.environment)) for prices in columns]
            shown = [cells.error(row), *(cells.latency(price) for price in found)]
            table.add_row(*_who(row, several), *(Text(cell) for cell in shown))
    return table


def _table(title: str, several: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(title, overflow="fold", min_width=12)
    if several:
        table.add_column("in", overflow="fold", style="dim")
    return table


def _who(row: view.Row, several: bool) -> list[Text]:
    engine = Text(view.clean(row.engine))
    return [engine, Text(view.clean(row.environment))] if several else [engine]


def _notes(sheet: view.Sheet, console: Console) -> None:
    everything = {scenario for row in sheet.rows for scenario in row.results}
    for note in view.notes(sheet):
        line = Text()
        style = "bold" if note.serious else "dim"
        line.append(view.clean(", ".join(note.engines)), style=style)
        if set(note.scenarios) != everything:
            line.append(view.clean(f" ({', '.join(note.scenarios)})"), style="dim")
        line.append(f": {view.clean(note.text)}", style="yellow" if note.serious else "dim")
        console.print(Padding(line, (0, 0, 0, 2)))


def _legend(report: Report, sheet: view.Sheet, console: Console) -> None:
    """What the marks of doubt beside the ratios mean, if there are any."""
    doubts = {
        doubt
        for pass_, shape in view.headline(sheet)
        for price in pricing.prices(report, sheet, pass_, shape).values()
        for doubt in price.doubts
    }
    for mark in sorted(cells.DOUBT_MARKS[doubt] for doubt in doubts):
        console.print(Text(f"  {mark} {cells.DOUBT_LEGEND[mark]}", style="dim"))


def _claims(report: Report, console: Console) -> None:
    broken = view.broken_claims(report)
    for claim in broken:
        line = Text("claim contradicted: ", style="bold red")
        line.append(
            view.clean(
                f"{claim.engine} is said to be {claim.property.value} ({claim.source}); "
                f"on {claim.case} it is not: {claim.variation}"
            )
        )
        console.print(line)
