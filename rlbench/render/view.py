"""What the tables show, computed once for the terminal, Markdown and CSV."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlbench.results.schema import Case, Check, Environment, Point, Report, Result
from rlbench.results.vocabulary import ANSWERED, BROKEN, Property, Status

if TYPE_CHECKING:
    from rlbench.differences import Differences

INVARIANCE = ("batch", "chunked-prefill", "decode", "backward")
PROBE_SPREAD = 0.03
"""Two engines' clock probes further apart than this make their ratio doubtful."""
WRONG_ERROR = 10.0
"""An error so many times plain torch's is no rounding: such an engine is nobody's yardstick."""
FIRST, LAST = ("rlbench",), ("control",)


@dataclass(frozen=True)
class Row:
    """One engine in one environment, with its results by scenario."""

    engine: str
    environment: str
    results: dict[str, Result]

    def result(self, scenario: str) -> Result | None:
        return self.results.get(scenario)


@dataclass(frozen=True)
class Sheet:
    """One case: its rows, its own engine first, the control last."""

    case: Case | None
    op: str
    case_id: str
    rows: list[Row]


@dataclass(frozen=True)
class Price:
    """One latency point beside the fastest comparable one."""

    point: Point
    ratio: float
    """Over the fastest on the same device and driver."""
    doubts: tuple[str, ...]
    """Why the ratio is to be read with care: another timer, clocks that moved."""


def sheets(report: Report) -> list[Sheet]:
    """The report by op and case. Engines unavailable here but measured elsewhere are left out."""
    cases = {(c.op, c.id): c for c in report.cases}
    found: dict[tuple[str, str], dict[tuple[str, str], dict[str, Result]]] = {}
    for result in report.results:
        by_engine = found.setdefault((result.op, result.case), {})
        by_engine.setdefault((result.engine, result.environment), {})[result.scenario] = result
    out = []
    for (op, case_id), by_engine in sorted(found.items()):
        rows = [Row(engine, env, results) for (engine, env), results in by_engine.items()]
        rows = [row for row in rows if not _superseded(row, rows)]
        rows.sort(key=lambda row: (_rank(row.engine), row.engine, row.environment))
        out.append(Sheet(cases.get((op, case_id)), op, case_id, rows))
    return out


def _superseded(row: Row, rows: Sequence[Row]) -> bool:
    def nowhere(r: Row) -> bool:
        return all(result.status is Status.UNAVAILABLE for result in r.results.values())

    return nowhere(row) and any(r.engine == row.engine and not nowhere(r) for r in rows)


def _rank(engine: str) -> int:
    if _is_control(engine):
        return 2
    return 0 if engine.split(":", maxsplit=1)[0] in FIRST else 1


def tally(result: Result) -> tuple[int, int]:
    """(checks with equal bits, checks)."""
    checks = result.checks or []
    return sum(check.equal for check in checks), len(checks)


@dataclass(frozen=True)
class Question:
    """One check of one scenario, over all engines that took it."""

    scenario: str
    variation: str
    exercised: str
    differing: tuple[str, ...]
    """`engine (share of elements)`, for each whose bits differed."""
    asked: int
    """Engines that took it, the control not counted."""


def questions(sheet: Sheet) -> list[Question]:
    """Every check asked of this case, in the order of asking."""
    found: dict[tuple[str, str], list[tuple[str, Check]]] = {}
    for row in sheet.rows:
        for scenario in INVARIANCE:
            result = row.result(scenario)
            for check in (result.checks if result else None) or ():
                found.setdefault((scenario, check.variation), []).append((row.engine, check))
    order = {scenario: i for i, scenario in enumerate(INVARIANCE)}
    return [
        Question(
            scenario,
            variation,
            next((c.exercised for _, c in checks if c.exercised), ""),
            tuple(f"{e} ({_share(c)})" for e, c in checks if not c.equal and not _is_control(e)),
            sum(not _is_control(engine) for engine, _ in checks),
        )
        for (scenario, variation), checks in sorted(found.items(), key=lambda i: order[i[0][0]])
    ]


def _share(check: Check) -> str:
    share = 100 * check.differing / check.elements
    return f"{share:.0f} %" if share >= 1 else "under 1 %"


def _is_control(engine: str) -> bool:
    return engine.split(":", maxsplit=1)[0] in LAST


def nans(result: Result) -> int:
    """NaN elements in any output of a result."""
    bits = sum(check.nans for check in result.checks or ())
    return bits + sum(errors.nonfinite for errors in (result.errors or {}).values())


def twice(sheet: Sheet) -> bool:
    """Whether some engine has rows from several environments, which then must be named."""
    return len({row.engine for row in sheet.rows}) < len(sheet.rows)


def shapes(sheet: Sheet) -> list[tuple[str, str]]:
    """(pass, shape) of every latency point, in the order measured."""
    seen: dict[tuple[str, str], None] = {}
    for row in sheet.rows:
        result = row.result("latency")
        for point in (result.points if result else None) or ():
            seen.setdefault((point.pass_, point.shape))
    order = {pass_: i for i, (pass_, _) in enumerate(reversed(seen))}
    return sorted(seen, key=lambda key: -order[key[0]])


def headline(sheet: Sheet) -> list[tuple[str, str]]:
    """One shape a pass for the short table: the longest single sequence."""
    chosen: dict[str, str] = {}
    for pass_, shape in shapes(sheet):
        single = shape.startswith("1x")
        if pass_ not in chosen or single:
            chosen[pass_] = shape
    return list(chosen.items())


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


@dataclass(frozen=True)
class Broken:
    """A claim of an engine's makers that the measurement contradicts."""

    engine: str
    property: Property
    source: str
    case: str
    variation: str


def broken_claims(report: Report) -> list[Broken]:
    """Every claim that some check contradicts, once a case."""
    claims = {(e.id, e.environment): e.claims for e in report.engines}
    found: dict[tuple[str, str, str], Broken] = {}
    for result in report.results:
        for claim in claims.get((result.engine, result.environment), ()):
            for check in result.checks or ():
                if check.property is claim.property and not check.equal:
                    key = (result.engine, claim.property.value, result.case)
                    found.setdefault(
                        key,
                        Broken(
                            result.engine,
                            claim.property,
                            claim.source,
                            result.case,
                            check.variation,
                        ),
                    )
    return list(found.values())


@dataclass(frozen=True)
class Note:
    """A line under the table: who, in which scenarios, and what there is to know."""

    engines: tuple[str, ...]
    scenarios: tuple[str, ...]
    text: str
    serious: bool
    variations: tuple[str, ...]
    """The questions it is about, where it is not about all."""


def notes(sheet: Sheet) -> list[Note]:
    """Reasons of what was not measured, unproven checks, NaNs; equal ones joined."""
    remarks: dict[tuple[str, bool], dict[str, dict[str, list[str]]]] = {}
    for row in sheet.rows:
        for scenario, result in row.results.items():
            for text, serious, variations in _remarks(result):
                by_engine = remarks.setdefault((text, serious), {})
                by_engine.setdefault(row.engine, {}).setdefault(scenario, []).extend(variations)
    found = []
    for (text, serious), by_engine in remarks.items():
        joined: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for engine, by_scenario in by_engine.items():
            named = tuple(dict.fromkeys(v for vs in by_scenario.values() for v in vs))
            joined.setdefault((tuple(by_scenario), named), []).append(engine)
        found += [
            Note(tuple(engines), scenarios, text, serious, named)
            for (scenarios, named), engines in joined.items()
        ]
    return found


def present(sheet: Sheet) -> Sheet:
    """The sheet without its absent rows."""
    gone = absent(sheet)
    return replace(sheet, rows=[row for row in sheet.rows if row not in gone])


def absent(sheet: Sheet) -> list[Row]:
    """Rows without a single measurement that nothing went wrong with: not worth a line."""
    idle = (Status.UNAVAILABLE, Status.UNSUPPORTED)
    return [r for r in sheet.rows if all(x.status in idle for x in r.results.values())]


def _remarks(result: Result) -> Iterable[tuple[str, bool, list[str]]]:
    if result.status not in ANSWERED:
        yield result.reason or "", result.status in (*BROKEN, Status.OOM), []
    if result.status is Status.UNPROVEN:
        names = [check.variation for check in result.checks or () if not check.proven]
        yield f"the control did not fail: {', '.join(names)}", True, []
    if nans(result):
        yield f"{nans(result)} output elements are NaN or infinite", True, []
    by_reason: dict[str, list[str]] = {}
    for skipped in result.skipped or ():
        by_reason.setdefault(skipped.reason, []).append(skipped.variation)
    for reason, variations in by_reason.items():
        yield reason, False, variations


@dataclass(frozen=True)
class Group:
    """Engines that gave the same bits."""

    digest: str
    engines: tuple[str, ...]
    """Each with its environment where the case has it from several."""


def agreement(sheet: Sheet) -> dict[str, list[Group]]:
    """Output tensor -> groups of engines whose bits agree, largest first; lone engines too."""
    tensors: dict[str, dict[str, set[str]]] = {}
    for row in sheet.rows:
        for result in row.results.values():
            for tensor, digest in (result.digests or {}).items():
                name = f"{result.scenario} {tensor}"
                engines = tensors.setdefault(name, {}).setdefault(digest, set())
                engines.add(label(sheet, row.engine, row.environment))
    return {
        name: sorted(
            (Group(digest, tuple(sorted(engines))) for digest, engines in groups.items()),
            key=lambda g: (-len(g.engines), g.engines),
        )
        for name, groups in sorted(tensors.items())
    }


def label(sheet: Sheet, engine: str, environment: str) -> str:
    """The engine, with its environment if the sheet has it from several."""
    several = sum(row.engine == engine for row in sheet.rows) > 1
    return f"{engine} ({environment})" if several else engine


@dataclass(frozen=True)
class Matrix:
    """The groups of one output whose tensors were saved, and how far each two are apart."""

    groups: list[Group]
    unsaved: list[Group]
    cells: list[list[str]]
    """Above the diagonal the largest difference, below it the mean one."""


def matrix(groups: Sequence[Group], differences: Differences | None) -> Matrix | None:
    """None where there are no two groups to compare."""
    if differences is None:
        return None
    saved = [group for group in groups if group.digest in differences.read]
    if len(saved) < 2:
        return None
    return Matrix(
        saved,
        [group for group in groups if group not in saved],
        [[_apart(differences, saved, i, j) for j in range(len(saved))] for i in range(len(saved))],
    )


def _apart(differences: Differences, groups: Sequence[Group], i: int, j: int) -> str:
    if i == j:
        return "·"
    # Not there only if the same digest stands for tensors of two outputs.
    pair = differences.pairs.get(frozenset((groups[i].digest, groups[j].digest)))
    return magnitude(pair.largest if i < j else pair.mean) if pair else "–"


def magnitude(value: float) -> str:
    """`3.9e-3`, `1.5`, `NaN`; `±0` where unequal bits are equal numbers."""
    if value == 0:
        return "±0"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}" if int(power or 0) else digits.replace("nan", "NaN")


def unsaved(sheet: Sheet, differences: Differences | None) -> list[str]:
    """The engines whose outputs should have been compared and could not be read."""
    keys = differences.unsaved if differences else ()
    here = [key for key in keys if key[:2] == (sheet.op, sheet.case_id)]
    return sorted(label(sheet, engine, environment) for _, _, engine, environment, _ in here)


def clean(text: str) -> str:
    """Text from a report without control characters: what a terminal would obey is dropped."""
    return "".join(
        " " if c in "\n\t\r" else c
        for c in text
        if c in "\n\t\r" or unicodedata.category(c)[0] != "C"
    )


def duration(us: float) -> str:
    """Microseconds, as people read them."""
    if us < 999.5:
        return f"{us:.1f} µs" if us < 99.95 else f"{us:.0f} µs"
    return f"{us / 1000:.2f} ms" if us < 99_995 else f"{us / 1000:.0f} ms"
