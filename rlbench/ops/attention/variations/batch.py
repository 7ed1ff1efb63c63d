"""Neighbours, places and padding, for a whole prefill and for the last few rows of one.

The few rows are where engines change their path: one neighbour moves the batch's longest query
across a tile size, a crowd of one-query steps changes how many splits each gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from rlbench.ops._op import Part, Trial, Variation
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, rows
from rlbench.ops.attention.variations._around import OTHER_NEIGHBOUR, Around, Span, one_call
from rlbench.results.vocabulary import Property


def variations(around: Around) -> Iterator[Variation]:
    yield from _whole(around)
    for tail in around.sizes.tails:
        for page_size in (0, around.page_size):
            yield from _tail(around, tail, page_size)


def _whole(around: Around) -> Iterator[Variation]:
    """All of the target's rows, packed."""
    alone = one_call(lambda: pack([around.target], around.softmax_scale))
    batches = around.sizes.batches
    for name, lengths, position in batches:
        yield _variation(name, alone, _batch(around, partial(around.among, lengths, position)))
    name, lengths, position = batches[-1]
    others = partial(around.among, lengths, position, OTHER_NEIGHBOUR)
    yield _variation(f"{name}, other contents", alone, _batch(around, others))
    mirrored = partial(around.among, lengths[::-1], len(lengths) - position)
    yield _variation(f"{name}, reversed order", alone, _batch(around, mirrored))
    steps = _steps(around)
    name = f"among {len(steps)} decode steps"
    yield _variation(name, alone, around.beside(around.whole, steps, len(steps) // 2))
    padded = _batch(around, lambda: ([around.target], 0), padding=37)
    yield _variation("alone, then 37 rows of padding", alone, padded)


def _tail(around: Around, tail: int, page_size: int) -> Iterator[Variation]:
    """The target's last rows only, as a chunk's or a decode step's, packed or paged."""
    tokens = around.target.tokens
    span = (tokens - tail, tokens)
    alone = around.beside(span, (), page_size=page_size)
    what = f"last {tail} rows" if tail > 1 else "last row"
    if page_size:
        what += f", pages of {page_size}"
    for longest in around.sizes.longest_queries:
        beside = around.beside(span, ((0, longest),), position=1, page_size=page_size)
        yield _variation(f"{what}: longest query {longest}", alone, beside)
    steps = _steps(around)
    beside = around.beside(span, steps, len(steps) // 3, page_size)
    yield _variation(f"{what}: among {len(steps)} decode steps", alone, beside)
    mixed = ((0, tokens), *steps[: len(steps) // 3])
    beside = around.beside(span, mixed, len(mixed), page_size)
    yield _variation(f"{what}: after a prefill and {len(mixed) - 1} decode steps", alone, beside)


def _steps(around: Around) -> tuple[Span, ...]:
    """One query each, against contexts from 1 key to about twice the target's."""
    lengths = (1 + (i * 389) % (2 * around.target.tokens) for i in range(around.sizes.crowd))
    return tuple((n - 1, n) for n in lengths)


def _batch(
    around: Around, batch: Callable[[], tuple[list[Sequence], int]], padding: int = 0
) -> Trial:
    def parts() -> Iterator[Part]:
        sequences, start = batch()
        call = pack(sequences, around.softmax_scale, padding=padding)
        yield Part(call, rows(start, start + around.target.tokens))

    return Trial(parts)


def _variation(name: str, expected: Trial, actual: Trial) -> Variation:
    return Variation(name, "prefill", Property.BATCH_INVARIANT, expected, actual)
