"""What the calls of a trial looked like: the sizes by which engines choose their path."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlbench.ops._op import Call


class Exercised:
    """Counts entries and the range of every size over a trial's calls."""

    def __init__(self) -> None:
        self._entries: Counter[str] = Counter()
        self._sizes: dict[str, list[int]] = {}

    def add(self, call: Call) -> None:
        self._entries[call.entry] += 1
        for name, size in call.sizes.items():
            self._sizes.setdefault(name, []).append(size)

    def __str__(self) -> str:
        """`16 × prefill: sequences 1, total_q 40 to 64, …`."""
        calls = ", ".join(f"{count} × {entry}" for entry, count in self._entries.items())
        sizes = ", ".join(f"{name} {_range(values)}" for name, values in self._sizes.items())
        return f"{calls}: {sizes}"


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
