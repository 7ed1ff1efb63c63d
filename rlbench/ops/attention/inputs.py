"""Sequences as exact integer arithmetic: the same bits on every device and torch version.

Element i of a tensor is a counter hash of (seed, sequence, tensor, i): the sum of four 16-bit
uniforms, centred and divided by a power of two, a bell shape with standard deviation 1.15; one
element in 512 is 8 times larger, because real activations have outliers and uniform ones make
softmax flat. Every step up to the final rounding to the case's dtype is exact in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rlbench.ops._op import SEED

_MASK = 0xFFFFFFFF
_OUTLIER_EVERY = 512
_CHUNK = 1 << 24

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
        key = hash_word(SEED ^ ((4 * self.stream + _NUMBER[name]) * 0x1000193) & _MASK)
        flat = values(
            key, (stop - start) * width, TORCH_DTYPES[self.dtype], self.device, first=start * width
        )
        return flat.view(stop - start, heads, self.head_dim)

    def whole(self, name: str) -> torch.Tensor:
        """All tokens of `q`, `k`, `v` or `dout`."""
        return self.rows(name, 0, self.tokens)


def values(key: int, count: int, dtype: torch.dtype, device: str, first: int = 0) -> torch.Tensor:
    """Values first … first + count of the stream `key`; in pieces, the int64 scratch stays small."""
    out = torch.empty(count, dtype=dtype, device=device)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        counter = torch.arange(first + start, first + stop, dtype=torch.int64, device=device)
        low = _hash(counter ^ key)
        high = _hash(low ^ 0x9E3779B9)
        total = (low & 0xFFFF) + (low >> 16) + (high & 0xFFFF) + (high >> 16)
        centred = 2 * total - 4 * 0xFFFF
        outlier = (_hash(high ^ 0x85EBCA6B) % _OUTLIER_EVERY) == 0
        exact = torch.where(outlier, 8 * centred, centred).to(torch.float32)
        out[start:stop] = (exact * 2.0**-16).to(dtype)
    return out


def _hash(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit mixing function on int64 tensors; every product stays below 2**63."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & _MASK
    return (x >> 16) ^ x


def hash_word(x: int) -> int:
    """`_hash` of one Python integer."""
    x &= _MASK
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & _MASK
    return (x >> 16) ^ x
