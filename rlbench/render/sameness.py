"""Which engines gave the same bits, and how far apart the others are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlbench.render.view import Sheet

if TYPE_CHECKING:
    from rlbench.differences import Differences


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
