"""The target, its neighbours, and the calls they meet in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rlbench.ops._op import Call, Part, Trial
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import RowsOf, pack, page, rows
from rlbench.ops.attention.sizes import Sizes

NEIGHBOUR = 1
OTHER_NEIGHBOUR = 500
LONG = 800
"""Streams of the neighbours' sequences, of others of the same lengths, and of the long context."""

Span = tuple[int, int]
"""[start, stop): queries start … stop against keys 0 … stop."""


@dataclass(frozen=True)
class Around:
    """One target sequence and what variations are made of around it."""

    make: Callable[[int, int], Sequence]
    """(stream, tokens) -> that sequence, on the target's device."""
    target: Sequence
    sizes: Sizes
    softmax_scale: float
    _made: dict[tuple[int, int], Sequence] = field(default_factory=dict, init=False, repr=False)

    def sequence(self, stream: int, tokens: int) -> Sequence:
        """That sequence, the same one each time: it remembers what it was asked for."""
        key = (stream, tokens)
        if key not in self._made:
            self._made[key] = self.make(stream, tokens)
        return self._made[key]

    @property
    def whole(self) -> Span:
        return 0, self.target.tokens

    @property
    def page_size(self) -> int:
        """The usual one."""
        return self.sizes.page_sizes[0]

    def among(
        self, lengths: tuple[int, ...], position: int, stream: int = NEIGHBOUR
    ) -> tuple[list[Sequence], int]:
        """The target among whole neighbours, and the row its own rows begin at."""
        neighbours = [self.sequence(stream + i, n) for i, n in enumerate(lengths)]
        start = sum(lengths[:position])
        return [*neighbours[:position], self.target, *neighbours[position:]], start

    def span_call(
        self,
        sequences: list[Sequence],
        spans: list[Span],
        page_size: int = 0,
        junk: int | None = 1,
    ) -> Call:
        """The spans of their sequences, packed; or paged where a page size is given."""
        if page_size == 0:
            return pack(sequences, self.softmax_scale, spans)
        return page(sequences, spans, self.softmax_scale, page_size=page_size, junk=junk)

    def beside(
        self, span: Span, others: tuple[Span, ...], position: int = 0, page_size: int = 0
    ) -> Trial:
        """The target's `span` in one call with other sequences' spans, `position` of them before."""

        def parts() -> Iterator[Part]:
            company = [self.sequence(NEIGHBOUR + i, stop) for i, (_, stop) in enumerate(others)]
            sequences = [*company[:position], self.target, *company[position:]]
            spans = [*others[:position], span, *others[position:]]
            start = sum(stop - start for start, stop in others[:position])
            call = self.span_call(sequences, spans, page_size)
            yield Part(call, rows(start, start + span[1] - span[0]))

        return Trial(parts)


def one_call(call: Callable[[], Call]) -> Trial:
    """A trial of one call, all rows."""

    def parts() -> Iterator[Part]:
        yield Part(call(), RowsOf(slice(None)))

    return Trial(parts)
