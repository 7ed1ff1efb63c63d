"""Sequences of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlbench.ops._inputs import TORCH_DTYPES, stream_key, values

_NUMBER = {"q": 0, "k": 1, "v": 2, "dout": 3}


@dataclass(frozen=True)
class Sequence:
    """Sequence number `stream`: q, dout [tokens, q_heads, head_dim], k, v [tokens, kv_heads, …].

    Tensors are made when asked for; of each the last piece is remembered, because a neighbour is
    asked for the same rows again and again. Token t's values do not depend on the length, so a
    longer sequence extends a shorter one.
    """

    stream: int
    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str
    _kept: dict[str, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _last: dict[str, tuple[int, int, torch.Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def keep(self, *names: str) -> Sequence:
        """Make these tensors once and hold on to them, for a sequence that is used again."""
        self._kept.update({name: self.whole(name) for name in names})
        return self

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Tokens start:stop of `q`, `k`, `v` or `dout`."""
        if name in self._kept:
            return self._kept[name][start:stop]
        if self._last.get(name, ())[:2] != (start, stop):
            self._last[name] = (start, stop, self._made(name, start, stop))
        return self._last[name][2]

    def _made(self, name: str, start: int, stop: int) -> torch.Tensor:
        heads = self.kv_heads if name in ("k", "v") else self.q_heads
        width = heads * self.head_dim
        flat = values(
            stream_key(self.stream, _NUMBER[name]),
            (stop - start) * width,
            TORCH_DTYPES[self.dtype],
            self.device,
            first=start * width,
        )
        return flat.view(stop - start, heads, self.head_dim)

    def whole(self, name: str) -> torch.Tensor:
        """All tokens of `q`, `k`, `v` or `dout`."""
        return self.rows(name, 0, self.tokens)
