"""Every check, over all engines that were asked it."""

from __future__ import annotations

from dataclasses import dataclass

from rlbench.render.view import INVARIANCE, Sheet, is_control
from rlbench.results.schema import Check


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
            tuple(f"{e} ({_share(c)})" for e, c in checks if not c.equal and not is_control(e)),
            sum(not is_control(engine) for engine, _ in checks),
        )
        for (scenario, variation), checks in sorted(found.items(), key=lambda i: order[i[0][0]])
    ]


def _share(check: Check) -> str:
    share = 100 * check.differing / check.elements
    return f"{share:.0f} %" if share >= 1 else "under 1 %"
