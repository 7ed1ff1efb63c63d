"""The report as CSV: one line a figure, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from rlbench.render.view import clean
from rlbench.results.schema import Report, Result

HEAD = (
    "op", "case", "engine", "environment", "scenario", "status", "what", "figure", "value", "reason"
)  # fmt: skip
FORMULA = ("=", "+", "-", "@")


def render(report: Report) -> str:
    """Columns: the result's key, its status, what was looked at, the figure's name and value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEAD)
    for result in report.results:
        for what, figure, value in _figures(result):
            key = [safe(part) for part in result.key]
            writer.writerow(
                [*key, result.status.value, safe(what), figure, value, safe(result.reason or "")]
            )
    return out.getvalue()


def _figures(result: Result) -> Iterator[tuple[str, str, object]]:
    yield "", "seconds", result.seconds
    for check in result.checks or ():
        for figure in ("equal", "proven", "elements", "differing", "max_ulp", "nans"):
            yield check.variation, figure, getattr(check, figure)
    for tensor, errors in (result.errors or {}).items():
        for figure in type(errors).model_fields:
            value = getattr(errors, figure)
            yield tensor, figure, "" if value is None else value
    for point in result.points or ():
        for figure in ("median_us", "p10_us", "p90_us", "cv", "tflops", "gbps", "repeats", "timer"):
            value = getattr(point, figure)
            yield f"{point.pass_} {point.shape}", figure, "" if value is None else value


def safe(text: str) -> str:
    """Text a spreadsheet will not take for a formula."""
    shown = clean(text)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA) else shown
