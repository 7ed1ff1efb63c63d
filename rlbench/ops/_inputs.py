"""Inputs as exact integer arithmetic: the same bits on every device and torch version.

Element i of a tensor is a counter hash of (seed, stream, tensor, i): the sum of four 16-bit
uniforms, centred and divided by a power of two, a bell shape with standard deviation 1.15; one
element in 512 is 8 times larger, because real activations have outliers and uniform ones make
tests blind. Every step up to the final rounding to the case's dtype is exact in fp32.
"""

from __future__ import annotations

import torch

from rlbench.ops._op import SEED

_MASK = 0xFFFFFFFF
_OUTLIER_EVERY = 512
_CHUNK = 1 << 24

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def hash_words(*words: int) -> int:
    """One word that depends on all of them and on their order."""
    mixed = 1
    for word in words:
        mixed = hash_word(mixed ^ word)
    return mixed


def stream_key(stream: int, tensor: int) -> int:
    """The key of tensor number `tensor`, one of four, of a stream."""
    return hash_word(SEED ^ ((4 * stream + tensor) * 0x1000193) & _MASK)


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
