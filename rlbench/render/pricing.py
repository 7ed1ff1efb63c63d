"""Latencies beside the fastest comparable one, and why a ratio may mislead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlbench.render.view import Row, Sheet
from rlbench.results.schema import Environment, Point, Report

PROBE_SPREAD = 0.03
"""Two engines' clock probes further apart than this make their ratio doubtful."""
WRONG_ERROR = 10.0
"""An error so many times plain torch's is no rounding: such an engine is nobody's yardstick."""


@dataclass(frozen=True)
class Price:
    """One latency point beside the fastest comparable one."""

    point: Point
    ratio: float
    """Over the fastest on the same device and driver."""
    doubts: tuple[str, ...]
    """Why the ratio is to be read with care: another timer, clocks that moved."""


def prices(report: Report, sheet: Sheet, pass_: str, shape: str) -> dict[tuple[str, str], Price]:
    """(engine, environment) -> its latency at one shape, beside the fastest comparable one."""
    environments = {e.id: e for e in report.environments}
    points = {
        (row.engine, row.environment): point
        for row in sheet.rows
        for point in _points(row)
        if (point.pass_, point.shape) == (pass_, shape)
    }
    wrong = {(row.engine, row.environment) for row in sheet.rows if _is_wrong(row, pass_)}
    out = {}
    for key, point in points.items():
        rivals = [other for other in points if _same_device(environments, key[1], other[1])]
        # A fast wrong answer is no yardstick, unless there is no other.
        best = min(rivals, key=lambda k: (k in wrong, points[k].median_us))
        doubts = _doubts(environments, points, key, best)
        out[key] = Price(
            point,
            point.median_us / points[best].median_us,
            ("wrong", *doubts) if key in wrong else doubts,
        )
    return out


def _is_wrong(row: Row, pass_: str) -> bool:
    """Whether some output of the pass is not finite, or far from fp64 beside plain torch's."""
    result = row.result("accuracy")
    return any(
        errors.nonfinite > 0 or (errors.ratio_to_torch or 0.0) > WRONG_ERROR
        for tensor, errors in ((result.errors if result else None) or {}).items()
        if tensor.startswith(f"{pass_}.")
    )


def _points(row: Row) -> Iterable[Point]:
    result = row.result("latency")
    return (result.points if result else None) or ()


def _same_device(environments: dict[str, Environment], a: str, b: str) -> bool:
    if a == b:
        return True
    if a not in environments or b not in environments:
        return False
    one, two = environments[a].device, environments[b].device
    return (one.name, one.driver) == (two.name, two.driver)


def _doubts(
    environments: dict[str, Environment],
    points: dict[tuple[str, str], Point],
    key: tuple[str, str],
    best: tuple[str, str],
) -> tuple[str, ...]:
    if key == best:
        return ()
    doubts = []
    if points[key].timer != points[best].timer:
        doubts.append("timer")
    ours, theirs = _probe(environments, key), _probe(environments, best)
    if ours and theirs and max(ours, theirs) > min(ours, theirs) * (1 + PROBE_SPREAD):
        doubts.append("clocks")
    return tuple(doubts)


def _probe(environments: dict[str, Environment], key: tuple[str, str]) -> float | None:
    """The mean of an engine's clock probes, before and after its jobs."""
    environment = environments.get(key[1])
    probes = [p.tflops for p in (environment.probes if environment else []) if p.engine == key[0]]
    return sum(probes) / len(probes) if probes else None
