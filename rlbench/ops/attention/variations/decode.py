"""Decode steps through a paged cache: against the prefill, among others, in other pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rlbench.ops._op import Part, Trial, Variation
from rlbench.ops.attention.layouts import pack, page, rows
from rlbench.ops.attention.variations._around import LONG, NEIGHBOUR, Around
from rlbench.results.vocabulary import Property

CHUNK = 64
"""Queries of the chunk that a very long context's last row is taken from: a whole prefill of it
would not fit where scores are materialized."""


def variations(around: Around) -> Iterator[Variation]:
    sizes = around.sizes
    alone = Trial(partial(_steps, around, sizes.positions))
    early = Trial(partial(_steps, around, sizes.early_positions))
    for name, positions, steps in (
        ("early steps", sizes.early_positions, early),
        ("step", sizes.positions, alone),
    ):
        yield Variation(
            f"{name} = prefill's row, pages of {around.page_size}",
            "decode",
            Property.DECODE_INVARIANT,
            Trial(partial(_prefill_rows, around, positions)),
            steps,
        )
    yield Variation(
        f"step at {sizes.long_context} keys = the row of a chunk of {CHUNK}",
        "decode",
        Property.DECODE_INVARIANT,
        Trial(partial(_long_row, around)),
        Trial(partial(_long_step, around)),
    )

    def variation(name: str, what: Property, **changed: Any) -> Variation:
        changing = Trial(partial(_steps, around, sizes.positions, **changed))
        return Variation(name, "decode", what, alone, changing)

    for neighbours in sizes.decode_batches:
        name = f"step among {neighbours} others"
        yield variation(name, Property.BATCH_INVARIANT, neighbours=neighbours)
    for size in sizes.page_sizes[1:]:
        yield variation(f"pages of {size}", Property.LAYOUT_INVARIANT, page_size=size)
    yield variation("scattered pages", Property.LAYOUT_INVARIANT, shuffled=True)
    yield variation("other stale values", Property.LAYOUT_INVARIANT, junk=77)
    yield variation("NaN in unused slots", Property.LAYOUT_INVARIANT, junk=None)


def _prefill_rows(around: Around, positions: tuple[int, ...]) -> Iterator[Part]:
    call = pack([around.target], around.softmax_scale)
    yield Part(call, lambda outputs: {"out": outputs["out"][list(positions)]})


def _steps(
    around: Around,
    positions: tuple[int, ...],
    *,
    neighbours: int = 0,
    page_size: int = 0,
    shuffled: bool = False,
    junk: int | None = 1,
) -> Iterator[Part]:
    """One decode call a position, the target somewhere among its neighbours."""
    others = [
        around.sequence(NEIGHBOUR + i, 16 + (i * 389) % (2 * around.target.tokens))
        for i in range(neighbours)
    ]
    for number, position in enumerate(positions):
        place = (number * 7) % (neighbours + 1)
        sequences = [*others[:place], around.target, *others[place:]]
        spans = [(s.tokens - 1, s.tokens) for s in sequences]
        spans[place] = (position, position + 1)
        call = page(
            sequences,
            spans,
            around.softmax_scale,
            page_size=page_size or around.page_size,
            shuffled=shuffled,
            junk=junk,
            decode=True,
        )
        yield Part(call, rows(place, place + 1))


def _long_row(around: Around) -> Iterator[Part]:
    tokens = around.sizes.long_context
    call = around.span_call([around.sequence(LONG, tokens)], [(tokens - CHUNK, tokens)])
    yield Part(call, rows(CHUNK - 1, CHUNK))


def _long_step(around: Around) -> Iterator[Part]:
    tokens = around.sizes.long_context
    call = page(
        [around.sequence(LONG, tokens)],
        [(tokens - 1, tokens)],
        around.softmax_scale,
        page_size=around.page_size,
        decode=True,
    )
    yield Part(call, rows(0, 1))
