"""A prefill in chunks, of any size, contiguous or paged, against the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from rlbench.ops._op import Part, Trial, Variation
from rlbench.ops.attention.layouts import pack, rows
from rlbench.ops.attention.variations._around import NEIGHBOUR, Around, Span, one_call
from rlbench.results.vocabulary import Property


def variations(around: Around) -> Iterator[Variation]:
    whole = one_call(lambda: pack([around.target], around.softmax_scale))
    tokens, page_size = around.target.tokens, around.page_size

    def variation(
        name: str,
        parts: Callable[[], Iterator[Part]],
        what: Property = Property.CHUNK_INVARIANT,
    ) -> Variation:
        return Variation(name, "prefill", what, whole, Trial(parts))

    for size in around.sizes.chunks:
        spans = _spans(tokens, size)
        yield variation(f"chunks of {size}", partial(_chunks, around, spans))
    for size in around.sizes.chunks:
        spans = _spans(tokens, size)
        name = f"chunks of {size}, pages of {page_size}"
        yield variation(name, partial(_chunks, around, spans, page_size))
    growing = _growing_spans(tokens)
    yield variation("growing chunks 1, 2, 4 …", lambda: _chunks(around, growing))
    spans = _spans(tokens, around.sizes.chunks[0])
    yield variation("chunks among neighbours", lambda: _chunks_among(around, spans))
    name = f"whole, pages of {page_size}"
    yield variation(name, lambda: _chunks(around, [around.whole], page_size))
    yield variation(
        f"{name}, NaN in unused slots",
        lambda: _chunks(around, [around.whole], page_size, junk=None),
        Property.LAYOUT_INVARIANT,
    )


def _chunks(
    around: Around, spans: list[Span], page_size: int = 0, junk: int | None = 1
) -> Iterator[Part]:
    for span in spans:
        yield Part(around.span_call([around.target], [span], page_size, junk), rows(0))


def _chunks_among(around: Around, spans: list[Span]) -> Iterator[Part]:
    """Each chunk between a one-token step and another sequence's chunk."""
    before = around.sequence(NEIGHBOUR, 40)
    after = around.sequence(NEIGHBOUR + 1, around.target.tokens)
    for start, stop in spans:
        sequences = [before, around.target, after]
        call = around.span_call(sequences, [(39, 40), (start, stop), (start, stop)])
        yield Part(call, rows(1, 1 + stop - start))


def _spans(tokens: int, size: int) -> list[Span]:
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _growing_spans(tokens: int) -> list[Span]:
    spans, start, size = [], 0, 1
    while start < tokens:
        spans.append((start, min(start + size, tokens)))
        start, size = start + size, 2 * size
    return spans
