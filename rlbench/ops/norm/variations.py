"""The circumstances that must not change a bit of the target's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from rlbench.ops._op import Call, Outputs, Part, Trial, Variation
from rlbench.ops.norm.sizes import Sizes
from rlbench.results.vocabulary import Property

MakeCall = Callable[..., Call]
"""(pass, rows of `x`, `gate` and `dout`, by name) -> the call."""
Take = Callable[[Outputs], Outputs]
NEIGHBOURS, OTHER_NEIGHBOURS = 1, 2
PLACES = ("first", "last", "in the middle")
APART = 8
"""Elements between rows that lie apart: 16 bytes or more, which every engine can read."""


@dataclass(frozen=True)
class Around:
    """One target, and what may stand around it."""

    sizes: Sizes
    heads: int
    rows: Callable[[int, str, int, int], torch.Tensor]
    """(stream, name, start, stop) -> rows; stream 0 is the target's."""
    call: MakeCall
    names: tuple[str, ...]
    """Of the tensors that come in rows: `x`, and `gate` where there is one."""

    @property
    def target(self) -> int:
        """Rows that are watched."""
        return self.sizes.target * self.heads

    def tensors(
        self, pass_: str, pieces: list[tuple[int, int, int]], apart: int = 0
    ) -> dict[str, torch.Tensor]:
        """The pieces (stream, start, stop) under one another; rows `apart` elements further apart."""
        names = (*self.names, "dout") if pass_ == "backward" else self.names
        found = {}
        for name in names:
            joined = torch.cat([self.rows(stream, name, a, b) for stream, a, b in pieces])
            if apart:
                wide = joined.new_full((joined.shape[0], joined.shape[1] + apart), float("nan"))
                wide[:, : joined.shape[1]] = joined
                joined = wide[:, : joined.shape[1]]
            found[name] = joined
        return found


def batch(around: Around) -> Iterator[Variation]:
    """Neighbours, places, slices, and rows that lie apart, of both passes."""
    for pass_ in ("forward", "backward"):
        yield from _batch(around, pass_)


def _batch(around: Around, pass_: str) -> Iterator[Variation]:
    rows = around.target
    target = (0, 0, rows)
    alone = _trial(around, pass_, [target], _rows(0, rows))
    what = "" if pass_ == "forward" else f", {pass_}"

    def variation(name: str, actual: Trial, of: Property = Property.BATCH_INVARIANT) -> Variation:
        return Variation(f"{name}{what}", pass_, of, alone, actual)

    yield variation("row by row", Trial(partial(_slices, around, pass_, 1)))
    for size in around.sizes.slices:
        if size * around.heads == 1:
            continue  # row by row, once more
        slices = Trial(partial(_slices, around, pass_, size * around.heads))
        yield variation(f"slices of {size} tokens", slices)
    for number, tokens in enumerate(around.sizes.crowds):
        others = tokens * around.heads - rows
        place = PLACES[number % len(PLACES)]
        before = {"first": 0, "last": others}.get(place, others // 2)
        pieces = [(NEIGHBOURS, 0, before), target, (NEIGHBOURS, before, others)]
        actual = _trial(around, pass_, pieces, _rows(before, before + rows))
        yield variation(f"{place} of {tokens} tokens", actual)
    others = around.sizes.crowds[0] * around.heads - rows
    pieces = [(OTHER_NEIGHBOURS, 0, others), target]
    actual = _trial(around, pass_, pieces, _rows(others, others + rows))
    yield variation(f"last of {around.sizes.crowds[0]} tokens, other contents", actual)
    apart = _trial(around, pass_, [target], _rows(0, rows), APART)
    yield variation(f"rows {APART} elements apart", apart, Property.LAYOUT_INVARIANT)
    wide = _trial(around, pass_, [target], _rows(0, rows), 1024)
    yield variation("rows 1024 elements apart", wide, Property.LAYOUT_INVARIANT)


def backward(around: Around) -> Iterator[Variation]:
    """The same backward again, here and in a process of its own: dweight, too, over all rows."""
    tokens = around.sizes.repeated
    for name, count in (("target", around.target), (f"{tokens} tokens", tokens * around.heads)):
        first = _trial(around, "backward", [(0, 0, count)], _everything)
        what = Property.BACKWARD_DETERMINISTIC
        for again in range(1, around.sizes.repeats + 1):
            repeated = _trial(around, "backward", [(0, 0, count)], _everything)
            yield Variation(f"run {again + 1}, {name}", "backward", what, first, repeated)
        elsewhere = Trial(first.parts, fresh_process=True)
        yield Variation(f"another process, {name}", "backward", what, first, elsewhere)


def _trial(
    around: Around, pass_: str, pieces: list[tuple[int, int, int]], take: Take, apart: int = 0
) -> Trial:
    """One call of those pieces."""

    def parts() -> Iterator[Part]:
        yield Part(around.call(pass_, **around.tensors(pass_, pieces, apart)), take)

    return Trial(parts)


def _slices(around: Around, pass_: str, size: int) -> Iterator[Part]:
    for start in range(0, around.target, size):
        stop = min(start + size, around.target)
        call = around.call(pass_, **around.tensors(pass_, [(0, start, stop)]))
        yield Part(call, _rows(0, stop - start))


def _rows(start: int, stop: int) -> Take:
    """Of what comes in rows: dweight is a sum over all of them."""
    return lambda outputs: {k: t[start:stop] for k, t in outputs.items() if k != "dweight"}


def _everything(outputs: Outputs) -> Outputs:
    return outputs


SCENARIOS: Mapping[str, Callable[[Around], Iterator[Variation]]] = {
    "batch": batch,
    "backward": backward,
}
