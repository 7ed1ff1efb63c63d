"""The circumstances that must not change a bit of the target's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from rlbench.ops._op import Call, Part, Trial, Variation
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import RowsOf, pack, pack_backward, page, rows
from rlbench.ops.attention.sizes import Sizes
from rlbench.results.vocabulary import Property

Batch = Callable[[], tuple[list[Sequence], int]]
"""Builds the sequences of a batch, and says at which row the target begins."""

_NEIGHBOUR = 1
_OTHER_NEIGHBOUR = 500
"""Streams of the neighbours' sequences, and of others of the same lengths."""


class Variations:
    """Attention's variations around one target sequence."""

    def __init__(
        self,
        sequence: Callable[[int, int], Sequence],
        target: Sequence,
        sizes: Sizes,
        softmax_scale: float,
    ) -> None:
        """sequence: (stream, tokens) -> that sequence, on the target's device."""
        self.sequence = sequence
        self.target = target
        self.sizes = sizes
        self.softmax_scale = softmax_scale

    def of(self, scenario: str) -> Iterator[Variation]:
        """The circumstances `scenario` changes; every one leaves the target's rows alone."""
        questions: dict[str, Callable[[], Iterator[Variation]]] = {
            "batch": self._batch,
            "chunked-prefill": self._chunked_prefill,
            "decode": self._decode,
            "backward": self._backward,
        }
        yield from questions[scenario]()

    # --- batch -----------------------------------------------------------------------------

    def _batch(self) -> Iterator[Variation]:
        alone = _trial(lambda: pack([self.target], self.softmax_scale))

        def variation(name: str, batch: Batch, padding: int = 0) -> Variation:
            def parts() -> Iterator[Part]:
                sequences, start = batch()
                call = pack(sequences, self.softmax_scale, padding=padding)
                yield Part(call, rows(start, start + self.target.tokens))

            return Variation(name, "prefill", Property.BATCH_INVARIANT, alone, Trial(parts))

        for name, lengths, position in self.sizes.batches:
            yield variation(name, partial(self._among, lengths, position))
        name, lengths, position = self.sizes.batches[-1]
        yield variation(
            f"{name}, other contents",
            partial(self._among, lengths, position, _OTHER_NEIGHBOUR),
        )
        yield variation(
            f"{name}, reversed order",
            partial(self._among, lengths[::-1], len(lengths) - position),
        )
        yield variation("alone, then 37 rows of padding", lambda: ([self.target], 0), padding=37)

    def _among(
        self, lengths: tuple[int, ...], position: int, stream: int = _NEIGHBOUR
    ) -> tuple[list[Sequence], int]:
        """The target among neighbours, and the row its own rows begin at."""
        sequences = [self.sequence(stream + i, n) for i, n in enumerate(lengths)]
        start = sum(lengths[:position])
        return [*sequences[:position], self.target, *sequences[position:]], start

    # --- chunked prefill --------------------------------------------------------------------

    def _chunked_prefill(self) -> Iterator[Variation]:
        whole = _trial(lambda: pack([self.target], self.softmax_scale))
        tokens, page_size = self.target.tokens, self.sizes.page_sizes[0]

        def variation(name: str, parts: Callable[[], Iterator[Part]]) -> Variation:
            return Variation(name, "prefill", Property.CHUNK_INVARIANT, whole, Trial(parts))

        for size in self.sizes.chunks:
            spans = _spans(tokens, size)
            yield variation(f"chunks of {size}", partial(self._chunks, spans))
        for size in self.sizes.chunks:
            spans = _spans(tokens, size)
            yield variation(
                f"chunks of {size}, pages of {page_size}",
                partial(self._chunks, spans, page_size),
            )
        growing = _growing_spans(tokens)
        yield variation("growing chunks 1, 2, 4 …", lambda: self._chunks(growing))
        yield variation(
            "chunks among neighbours",
            lambda: self._chunks_among(_spans(tokens, self.sizes.chunks[0])),
        )
        yield variation(
            f"whole, pages of {page_size}", lambda: self._chunks([(0, tokens)], page_size)
        )

    def _chunks(self, spans: list[tuple[int, int]], page_size: int = 0) -> Iterator[Part]:
        for span in spans:
            yield Part(self._span_call([self.target], [span], page_size), rows(0))

    def _chunks_among(self, spans: list[tuple[int, int]]) -> Iterator[Part]:
        """Each chunk between a one-token step and another sequence's chunk."""
        before = self.sequence(_NEIGHBOUR, 40)
        after = self.sequence(_NEIGHBOUR + 1, self.target.tokens)
        for start, stop in spans:
            sequences = [before, self.target, after]
            call = pack(sequences, self.softmax_scale, [(39, 40), (start, stop), (start, stop)])
            yield Part(call, rows(1, 1 + stop - start))

    def _span_call(
        self, sequences: list[Sequence], spans: list[tuple[int, int]], page_size: int
    ) -> Call:
        if page_size == 0:
            return pack(sequences, self.softmax_scale, spans)
        return page(sequences, spans, self.softmax_scale, page_size=page_size)

    # --- decode -----------------------------------------------------------------------------

    def _decode(self) -> Iterator[Variation]:
        early, positions = self.sizes.early_positions, self.sizes.positions
        alone = Trial(self._steps)
        for name, which, steps in (
            ("early steps", early, Trial(lambda: self._steps(positions=early))),
            ("step", positions, alone),
        ):
            yield Variation(
                f"{name} = prefill's row, pages of {self.sizes.page_sizes[0]}",
                "decode",
                Property.DECODE_INVARIANT,
                Trial(partial(self._prefill_rows, which)),
                steps,
            )

        def variation(name: str, what: Property, **changed: int | bool) -> Variation:
            trial = Trial(lambda: self._steps(**changed))  # type: ignore[arg-type]
            return Variation(name, "decode", what, alone, trial)

        for neighbours in self.sizes.decode_batches:
            name = f"step among {neighbours} others"
            yield variation(name, Property.BATCH_INVARIANT, neighbours=neighbours)
        for size in self.sizes.page_sizes[1:]:
            yield variation(f"pages of {size}", Property.LAYOUT_INVARIANT, page_size=size)
        yield variation("scattered pages", Property.LAYOUT_INVARIANT, shuffled=True)
        yield variation("other stale values", Property.LAYOUT_INVARIANT, junk=77)

    def _prefill_rows(self, positions: tuple[int, ...]) -> Iterator[Part]:
        call = pack([self.target], self.softmax_scale)
        yield Part(call, lambda outputs: {"out": outputs["out"][list(positions)]})

    def _steps(
        self,
        positions: tuple[int, ...] = (),
        neighbours: int = 0,
        page_size: int = 0,
        shuffled: bool = False,
        junk: int = 1,
    ) -> Iterator[Part]:
        """One decode call a position, the target somewhere among its neighbours."""
        others = [
            self.sequence(_NEIGHBOUR + i, 16 + (i * 389) % (2 * self.target.tokens)).keep("k", "v")
            for i in range(neighbours)
        ]
        for number, position in enumerate(positions or self.sizes.positions):
            place = (number * 7) % (neighbours + 1)
            sequences = [*others[:place], self.target, *others[place:]]
            spans = [(s.tokens - 1, s.tokens) for s in sequences]
            spans[place] = (position, position + 1)
            call = page(
                sequences,
                spans,
                self.softmax_scale,
                page_size=page_size or self.sizes.page_sizes[0],
                shuffled=shuffled,
                junk=junk,
                decode=True,
            )
            yield Part(call, rows(place, place + 1))

    # --- backward ---------------------------------------------------------------------------

    def _backward(self) -> Iterator[Variation]:
        def packed(lengths: tuple[int, ...], position: int) -> Trial:
            def parts() -> Iterator[Part]:
                sequences, start = self._among(lengths, position)
                call = pack_backward(sequences, self.softmax_scale)
                yield Part(call, rows(start, start + self.target.tokens))

            return Trial(parts)

        def variation(name: str, what: Property, expected: Trial, actual: Trial) -> Variation:
            return Variation(name, "backward", what, expected, actual)

        alone = packed((), 0)
        tokens = self.target.tokens
        batch = ("batch of 4", (tokens, 2 * tokens, tokens // 3), 1)
        for again in range(1, self.sizes.repeats + 1):
            yield variation(
                f"run {again + 1}, alone", Property.BACKWARD_DETERMINISTIC, alone, packed((), 0)
            )
        yield variation(
            "another process, alone",
            Property.BACKWARD_DETERMINISTIC,
            alone,
            Trial(alone.parts, fresh_process=True),
        )
        for name, lengths, position in (
            ("first of 4", batch[1], 0),
            ("second of 4", batch[1], 1),
            ("last of 4", batch[1], 3),
            ("first of 3, equal neighbours", (tokens, tokens), 0),
        ):
            yield variation(name, Property.BATCH_INVARIANT, alone, packed(lengths, position))
        crowd = packed(batch[1], batch[2])
        for again in range(1, self.sizes.repeats + 1):
            yield variation(
                f"run {again + 1}, {batch[0]}",
                Property.BACKWARD_DETERMINISTIC,
                crowd,
                packed(batch[1], batch[2]),
            )


def _trial(call: Callable[[], Call]) -> Trial:
    """A trial of one call, all rows."""

    def parts() -> Iterator[Part]:
        yield Part(call(), RowsOf(slice(None)))

    return Trial(parts)


def _spans(tokens: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _growing_spans(tokens: int) -> list[tuple[int, int]]:
    spans, start, size = [], 0, 1
    while start < tokens:
        spans.append((start, min(start + size, tokens)))
        start, size = start + size, 2 * size
    return spans
