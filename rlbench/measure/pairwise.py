"""How far apart tensors are: the absolute difference of every pair."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 1 << 15
"""Elements of each tensor looked at together: few enough to stay in a processor's cache."""


def differences(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest and the mean absolute difference of every pair, in fp64.

    tensors: T floating-point tensors of one shape, of any dtypes, with at least one element.
    Returns two symmetric fp64 tensors [T, T]. NaN where an element of a pair is NaN, or both are
    the same infinity.
    """
    count, elements = len(tensors), tensors[0].numel()
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    largest = torch.zeros(count, count, dtype=torch.float64)
    total = torch.zeros(count, count, dtype=torch.float64)
    for begin in range(0, elements, CHUNK):
        rows = torch.stack([row[begin : begin + CHUNK].double() for row in flat])
        for i in range(count - 1):
            apart = (rows[i + 1 :] - rows[i]).abs_()
            largest[i, i + 1 :] = torch.maximum(largest[i, i + 1 :], apart.amax(1))
            total[i, i + 1 :] += apart.sum(1)
    return largest + largest.T, (total + total.T) / elements
