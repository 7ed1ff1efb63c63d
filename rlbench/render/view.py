"""What the tables show, computed once for the terminal, Markdown and CSV."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlbench.results.schema import Case, Report, Result
from rlbench.results.vocabulary import ANSWERED, BROKEN, Property, Status

INVARIANCE = ("batch", "chunked-prefill", "decode", "backward")
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
    if is_control(engine):
        return 2
    return 0 if engine.split(":", maxsplit=1)[0] in FIRST else 1


def tally(result: Result) -> tuple[int, int]:
    """(checks with equal bits, checks)."""
    checks = result.checks or []
    return sum(check.equal for check in checks), len(checks)


def is_control(engine: str) -> bool:
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
