"""The report as Markdown, for a pull request or a README: whole, unlike the terminal's tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlbench.render import cells, pricing, questions, sameness, view
from rlbench.render.table import heading
from rlbench.results.schema import Report
from rlbench.results.vocabulary import ANSWERED

if TYPE_CHECKING:
    from rlbench.differences import Differences


def render(report: Report, differences: Differences | None = None) -> str:
    """Every case: verdicts, accuracy, latency by shape, agreement, notes; then provenance."""
    parts = ["# rlbench report", _how_to_read()]
    for whole in view.sheets(report):
        several = view.twice(whole)
        sheet = view.present(whole)
        parts.append(f"## {escape(heading(sheet))}")
        parts += [
            glance(report, sheet, several=several),
            _accuracy(sheet, several),
            *_latency(report, sheet, several),
            _questions(whole),
            _agreement(sheet),
            *_differences(sheet, differences),
            _notes(whole),
        ]
    return _page([*parts, _claims(report), _provenance(report)])


def agreement(report: Report, differences: Differences | None = None) -> str:
    """Every case: which engines gave the same bits, and how far apart the others are."""
    parts = ["# rlbench report: agreement"]
    for whole in view.sheets(report):
        sheet = view.present(whole)
        parts.append(f"## {escape(heading(sheet))}")
        parts += [_agreement(sheet), *_differences(sheet, differences)]
    return _page([*parts, _provenance(report)])


def _page(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _how_to_read() -> str:
    return (
        "A verdict counts the checks whose bits were all equal. `pass` means that every check was "
        "equal and that the control, an engine that is wrong on purpose, failed every one of them; "
        "`unproven` means that it did not, so nothing was shown. A star: the engine does not take "
        "some of the variations; the notes say which. Latencies are medians, with the ratio to the "
        "fastest; ~, † and ‡ mark ratios to be read with care."
    )


def glance(report: Report, sheet: view.Sheet, *, several: bool) -> str:
    """One table a case: verdicts, the error beside plain torch's, one latency a pass."""
    scenarios = [s for s in view.INVARIANCE if any(s in row.results for row in sheet.rows)]
    accuracy = ["error × torch"] if any("accuracy" in row.results for row in sheet.rows) else []
    columns = [(p, s, pricing.prices(report, sheet, p, s)) for p, s in view.headline(sheet)]
    lines = []
    for row in sheet.rows:
        key = (row.engine, row.environment)
        verdicts = [_strong(cells.verdict(row.result(s))) for s in scenarios]
        errors = [cells.error(row) for _ in accuracy]
        latencies = [cells.latency(prices.get(key)) for _, _, prices in columns]
        lines.append([*_who(row, several), *verdicts, *errors, *latencies])
    shapes = [escape(f"{pass_} {shape}") for pass_, shape, _ in columns]
    return table([*_head(several), *scenarios, *accuracy, *shapes], lines)


def _strong(cell: str) -> str:
    return f"**{escape(cell)}**" if cell.startswith("FAIL") else escape(cell)


def _accuracy(sheet: view.Sheet, several: bool) -> str:
    lines = []
    for row in sheet.rows:
        result = row.result("accuracy")
        for tensor, e in ((result.errors if result else None) or {}).items():
            figures = [
                "–" if value is None else form.format(value)
                for value, form in (
                    (e.rel_rms, "{:.2e}"),
                    (e.ratio_to_torch, "{:.2f}×"),
                    (e.max_abs, "{:.2e}"),
                    (e.mean_abs, "{:.2e}"),
                    (e.ulp_p50, "{}"),
                    (e.ulp_p99, "{}"),
                    (e.ulp_max, "{}"),
                )
            ]
            lines.append([*_who(row, several), escape(tensor), *figures])
    if not lines:
        return ""
    head = [*_head(several), "tensor", "relative rms", "× plain torch", "max abs", "mean abs"]
    head += ["ULP p50", "p99", "max"]
    lines.sort(key=lambda line: line[len(_head(several))])
    return "### Error against fp64\n\n" + table(head, lines)


def _latency(report: Report, sheet: view.Sheet, several: bool) -> list[str]:
    by_pass: dict[str, list[str]] = {}
    for pass_, shape in view.shapes(sheet):
        by_pass.setdefault(pass_, []).append(shape)
    parts, marks = [], set()
    for pass_, shown in by_pass.items():
        columns = [pricing.prices(report, sheet, pass_, shape) for shape in shown]
        lines = []
        for row in sheet.rows:
            found = [column.get((row.engine, row.environment)) for column in columns]
            if any(found):
                lines.append(
                    [
                        *_who(row, several),
                        *(f"{cells.latency(p)} ({cells.rate(p)})" if p else "–" for p in found),
                    ]
                )
                marks |= {cells.DOUBT_MARKS[d] for p in found if p for d in p.doubts}
        title = f"### Latency, {escape(pass_)} (sequences × tokens; × the fastest)\n\n"
        parts.append(title + table([*_head(several), *map(escape, shown)], lines))
    if marks:
        parts.append("; ".join(f"{m}: {cells.DOUBT_LEGEND[m]}" for m in sorted(marks)) + ".")
    return parts


def _questions(sheet: view.Sheet) -> str:
    lines = [
        [
            escape(q.scenario),
            escape(q.variation),
            escape(q.exercised) or "–",
            escape(", ".join(q.differing)) or f"none of {q.asked}",
        ]
        for q in questions.questions(sheet)
        if q.asked
    ]
    if not lines:
        return ""
    head = ["scenario", "what was changed", "calls and sizes", "whose bits differed (elements)"]
    return "### What each check asked\n\n" + table(head, lines)


def _agreement(sheet: view.Sheet) -> str:
    lines = []
    for tensor, groups in sameness.agreement(sheet).items():
        shared = [_together(group) for group in groups if len(group.engines) > 1]
        alone = [_together(group) for group in groups if len(group.engines) == 1]
        if shared:
            lines.append([escape(tensor), "<br>".join(shared), ", ".join(alone) or "–"])
    if not lines:
        return ""
    head = ["output", "the same bits", "bits of their own"]
    return "### Which engines agree bit for bit\n\n" + table(head, lines)


def _together(group: sameness.Group) -> str:
    return " = ".join(map(escape, group.engines))


def _differences(sheet: view.Sheet, differences: Differences | None) -> list[str]:
    parts = []
    for tensor, groups in sameness.agreement(sheet).items():
        matrix = sameness.matrix(groups, differences)
        if matrix:
            numbers = [str(i + 1) for i in range(len(matrix.groups))]
            rows = zip(numbers, map(_together, matrix.groups), matrix.cells, strict=True)
            lines = [[number, engines, *row] for number, engines, row in rows]
            lines += [["–", _together(g), *("–" for _ in numbers)] for g in matrix.unsaved]
            parts.append(f"{escape(tensor)}:\n\n" + table(["", "engines", *numbers], lines))
    if parts:
        how = cells.HOW_TO_READ_DIFFERENCES
        parts.insert(0, f"### How far apart outputs are\n\n{how[0].upper()}{how[1:]}.")
    missing = sameness.unsaved(sheet, differences)
    if missing:
        parts.append(f"No saved outputs: {escape(', '.join(missing))}.")
    return parts


def _notes(sheet: view.Sheet) -> str:
    lines = [
        f"- **{escape(', '.join(note.engines))}** ({escape(', '.join(note.scenarios))}): "
        f"{escape(note.text)}" + _left_out(note)
        for note in view.notes(sheet)
    ]
    return "### Notes\n\n" + "\n".join(lines) if lines else ""


def _left_out(note: view.Note) -> str:
    return f" (left out: {escape('; '.join(note.variations))})" if note.variations else ""


def _claims(report: Report) -> str:
    lines = [
        f"- **{escape(b.engine)}** is said to be `{b.property.value}` ({escape(b.source)}); on "
        f"{escape(b.case)} it is not: {escape(b.variation)}"
        for b in view.broken_claims(report)
    ]
    return "## Claims contradicted\n\n" + "\n".join(lines) if lines else ""


def _provenance(report: Report) -> str:
    lines = [f"- rlbench {escape(report.rlbench.version)}, {escape(report.created)}"]
    lines += [f"- `{escape_code(' '.join(run.argv))}`" for run in report.runs]
    for e in report.environments:
        driver = f", driver {e.device.driver}" if e.device.driver else ""
        known = [
            f"{n} {v}" for n, v in e.packages.items() if not n.startswith(("nvidia-", "cuda-"))
        ]
        lines.append(
            f"- {escape(e.id)}: {escape(e.device.name)}{escape(driver)}, Python {escape(e.python)}, "
            f"{escape(', '.join(known))}"
        )
    measured = sum(result.status in ANSWERED for result in report.results)
    lines.append(f"- {measured} of {len(report.results)} results carry a measurement")
    return "## Provenance\n\n" + "\n".join(lines)


def _head(several: bool) -> list[str]:
    return ["engine", "environment"] if several else ["engine"]


def _who(row: view.Row, several: bool) -> list[str]:
    return [escape(row.engine), escape(row.environment)] if several else [escape(row.engine)]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table of cells that are already escaped."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def escape(text: str) -> str:
    """Untrusted text as Markdown that shows it and does nothing else."""
    shown = re.sub(r"([\\`*_{}\[\]()#+!|~<>])", r"\\\1", view.clean(text).replace("&", "&amp;"))
    return shown.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("://", ":&#47;&#47;")


def escape_code(text: str) -> str:
    """Untrusted text inside backticks."""
    return view.clean(text).replace("`", "'")
