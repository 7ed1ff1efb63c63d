"""The words in a table's cells. A verdict is always a word; colour only repeats it."""

from __future__ import annotations

from rlbench.render.pricing import Price
from rlbench.render.view import Row, duration, nans, tally
from rlbench.results.schema import Result
from rlbench.results.vocabulary import Status

STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.UNPROVEN: "yellow",
    Status.MEASURED: "",
    Status.UNSUPPORTED: "dim",
    Status.UNAVAILABLE: "dim",
    Status.OOM: "magenta",
    Status.TIMEOUT: "magenta",
    Status.CRASH: "bold magenta",
    Status.ERROR: "bold magenta",
}
DOUBT_MARKS = {"timer": "†", "clocks": "~", "wrong": "‡"}
DOUBT_LEGEND = {
    "†": "another timer than the fastest's",
    "~": "clock probes more than 3 % apart",
    "‡": "its error in this pass is over 10 times plain torch's, or not finite; it is not the fastest",
}


def verdict(result: Result | None) -> str:
    """`pass 9/9`, `FAIL 4/9` (checks whose bits were equal), or the status word.

    A star says that the engine did not take some of the variations; the notes say which.
    """
    if result is None:
        return ""
    if result.status in (Status.PASS, Status.FAIL, Status.UNPROVEN):
        word = result.status.value
        word = word.upper() if result.status is Status.FAIL else word
        equal, total = tally(result)
        star = "*" if result.skipped else ""
        return f"{word} {equal}/{total}{star}" + (" NaN!" if nans(result) else "")
    return str(result.status.value)


def style(result: Result | None) -> str:
    return STYLES[result.status] if result else ""


def error(row: Row) -> str:
    """The largest error of any output against fp64, as a multiple of plain torch's."""
    result = row.result("accuracy")
    if result is None or not result.errors:
        return "–" if result else ""
    if any(e.nonfinite for e in result.errors.values()):
        return "NaN!"
    ratios = [e.ratio_to_torch for e in result.errors.values() if e.ratio_to_torch is not None]
    return f"{max(ratios):.2f}×" if ratios else "–"


def latency(price: Price | None) -> str:
    """`1.23 ms 1.40×`: the median, and its ratio to the fastest, with marks of doubt."""
    if price is None:
        return "–"
    marks = "".join(DOUBT_MARKS[doubt] for doubt in price.doubts)
    ratio = f"{price.ratio:.2f}" if price.ratio < 9.995 else f"{price.ratio:.1f}"
    return f"{duration(price.point.median_us)} {ratio}×{marks}"


def rate(price: Price | None) -> str:
    """Achieved TFLOP/s or GB/s."""
    if price is None:
        return "–"
    point = price.point
    return f"{point.tflops:.0f} TFLOP/s" if point.tflops is not None else f"{point.gbps:.0f} GB/s"


HOW_TO_READ_DIFFERENCES = (
    "absolute differences in fp64: the largest above the diagonal, the mean below; "
    "±0: only signs of zeros differ"
)
