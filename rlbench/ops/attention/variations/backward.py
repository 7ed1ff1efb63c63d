"""The same backward again, in another process, and beside neighbours."""

from __future__ import annotations

from collections.abc import Iterator

from rlbench.ops._op import Part, Trial, Variation
from rlbench.ops.attention.layouts import pack_backward, rows
from rlbench.ops.attention.variations._around import Around
from rlbench.results.vocabulary import Property


def variations(around: Around) -> Iterator[Variation]:
    tokens = around.target.tokens
    alone = _packed(around, (), 0)
    mixed = (tokens, 2 * tokens, tokens // 3)
    yield from _repeated(around, "alone", (), 0, alone)
    for name, lengths, position in (
        ("first of 4", mixed, 0),
        ("second of 4", mixed, 1),
        ("last of 4", mixed, 3),
        ("first of 3, equal neighbours", (tokens, tokens), 0),
    ):
        crowd = _packed(around, lengths, position)
        yield _variation(name, Property.BATCH_INVARIANT, alone, crowd)
    yield from _repeated(around, "batch of 4", mixed, 1, _packed(around, mixed, 1))


def _repeated(
    around: Around, name: str, lengths: tuple[int, ...], position: int, first: Trial
) -> Iterator[Variation]:
    """`first` run again, here and in a process of its own."""
    what = Property.BACKWARD_DETERMINISTIC
    for again in range(1, around.sizes.repeats + 1):
        repeated = _packed(around, lengths, position)
        yield _variation(f"run {again + 1}, {name}", what, first, repeated)
    elsewhere = Trial(first.parts, fresh_process=True)
    yield _variation(f"another process, {name}", what, first, elsewhere)


def _packed(around: Around, lengths: tuple[int, ...], position: int) -> Trial:
    def parts() -> Iterator[Part]:
        sequences, start = around.among(lengths, position)
        call = pack_backward(sequences, around.softmax_scale)
        yield Part(call, rows(start, start + around.target.tokens))

    return Trial(parts)


def _variation(name: str, what: Property, expected: Trial, actual: Trial) -> Variation:
    return Variation(name, "backward", what, expected, actual)
