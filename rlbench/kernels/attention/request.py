"""A checked call, as what serves it needs it: tensors, sizes, and the parameters of a launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
BLOCK_KEYS = {64: 128, 128: 128, 256: 80}  # as definition.cuh has them; shared_bytes are checked
HEADS = 8  # query heads of a KV group that the decode kernels take together
SPLIT_BLOCKS = {64: 18, 128: 18, 256: 28}
_LOG2_E = math.log2(math.e)


def split_keys(head_dim: int) -> int:
    """Keys of a split."""
    return SPLIT_BLOCKS[head_dim] * BLOCK_KEYS[head_dim]


@dataclass(frozen=True)
class Request:
    """Something to compute."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    block_table: Tensor | None
    sequences: int
    max_seqlen_q: int
    splits: int
    """No sequence has keys in more of them."""
    causal: bool
    softmax_scale: float

    @property
    def device(self) -> int:
        index = self.q.device.index
        assert index is not None
        return index

    @property
    def build(self) -> tuple[int, str, bool]:
        """What every source is built for: head_dim, element, paged."""
        return self.q.shape[2], ELEMENTS[self.q.dtype], self.block_table is not None

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def decode_units(self) -> int:
        """What a decode step can be cut into: splits of sequences under up to HEADS query heads."""
        return self.splits * self.sequences * self.kv_heads * -(-self.group // HEADS)

    @property
    def first_numbers(self) -> tuple[int, ...]:
        """The parameters after the pointers, in the order of parameters.cuh."""
        k, v = self.k.stride(), self.v.stride()
        if self.block_table is None:
            k_strides, v_strides, table = (0, *k[:2]), (0, *v[:2]), (0, self.k.shape[0])
        else:
            k_strides, v_strides = k[:3], v[:3]
            table = (self.block_table.stride(0), self.k.shape[1])
        strides = (*self.q.stride()[:2], *k_strides, *v_strides, *self.out.stride()[:2])
        return (*strides, *table, self.kv_heads, self.group)

    @property
    def scales(self) -> tuple[float, float]:
        """The last parameters of every source."""
        return float(self.softmax_scale), self.softmax_scale * _LOG2_E
