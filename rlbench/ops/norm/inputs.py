"""Rows to normalize, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlbench.ops._inputs import TORCH_DTYPES, stream_key, values

_NUMBER = {"x": 0, "gate": 1, "dout": 2, "weight": 3}
_SPREAD = 2.0**-3
"""Of weights around the offset's complement: trained ones stay near 1."""


@dataclass(frozen=True)
class Rows:
    """Row number r of a stream is the same whatever rows are asked for with it."""

    stream: int
    width: int
    dtype: str
    device: str

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start:stop of `x`, `gate` or `dout`, [stop - start, width]."""
        count = (stop - start) * self.width
        key = stream_key(self.stream, _NUMBER[name])
        flat = values(key, count, TORCH_DTYPES[self.dtype], self.device, first=start * self.width)
        return flat.view(stop - start, self.width)


def weight(width: int, offset: int, dtype: str, device: str) -> torch.Tensor:
    """A weight [width] such that offset + weight is around 1; exact in fp32 before it is rounded."""
    spread = values(stream_key(0, _NUMBER["weight"]), width, torch.float32, device) * _SPREAD
    return (spread + (1 - offset)).to(TORCH_DTYPES[dtype])
