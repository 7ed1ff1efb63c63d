"""FlexAttention over packed calls and gathered pages; the loaded half of flex.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch._dynamo import config as dynamo
from torch._dynamo import mark_static
from torch._functorch import config as autograd
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from rlbench.ops._op import Kernel, Run
from rlbench.ops._runs import without_grad
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedDecode
from rlbench.ops.attention.eager import gradients

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask, float], torch.Tensor]
Compile = Callable[[Attend], Attend]

RECOMPILES = 4096
"""Far more kinds of shape than there are in a run; torch gives up after 8."""

# Dynamic, because every length would be compiled anew; fullgraph, because beyond the limit of
# recompilations torch would go on uncompiled without saying so.
compiled: Compile = partial(torch.compile, dynamic=True, fullgraph=True)


def kernel(compiled: Compile = compiled) -> Kernel:
    """The entry points; `compiled` is what turns a function into a compiled one."""
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = RECOMPILES
    # Buffers of the forward stay what they are, so that a backward can be run again.
    autograd.donated_buffer = False
    # The scale is a constant of the kernel, as it is where shapes are not dynamic.
    dynamo.specialize_float = True
    packed, padded = compiled(attend_packed), compiled(attend_padded)

    def prefill(call: PackedPrefill) -> Run:
        mask, scale = packed_mask(call), call.softmax_scale
        return without_grad(lambda: {"out": packed(call.q, call.k, call.v, mask, scale)})

    def decode(call: PagedDecode) -> Run:
        mask, scale, rows = length_mask(call), call.softmax_scale, padded_rows(call)
        k_cache, v_cache = call.k_cache.flatten(0, 1), call.v_cache.flatten(0, 1)
        return without_grad(
            lambda: {"out": padded(call.q, k_cache[rows], v_cache[rows], mask, scale)}
        )

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        out = packed(q, k, v, packed_mask(call), call.softmax_scale)
        return gradients(out, (q, k, v), call.dout)

    return Kernel(
        {"prefill": prefill, "decode": decode, "backward": backward},
        unsupported={
            "paged-prefill": "flex has no paged cache outside of torch.nn.attention.experimental"
        },
        resolved={
            "compile": "dynamic shapes, no autotuning",
            "launches": "one a batch, sequences kept apart by the block mask",
            "prefill": "the main kernel, for short chunks as well",
            "decode": "pages gathered before the launch, keys padded to the longest sequence",
            "num_splits": "auto",
        },
    )


# --- the compiled functions -----------------------------------------------------------------------


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """q [total_q, q_heads, dim], k and v [total_k, kv_heads, dim] -> shaped as q."""
    # Below 128 queries flex takes its decoding kernel, whose blocks hold all of a chunk's queries
    # at once: 64 queries of 8 heads a KV head are too many for it.
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True}
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options
    )
    return out[0].transpose(0, 1)


def attend_padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float
) -> torch.Tensor:
    """q [n, q_heads, dim], k and v [n, Lk, kv_heads, dim] -> shaped as q."""
    for tensor in (q, k, v):
        # The number of splits is made from the batch size; flex has no decoding kernel for a
        # dynamic one.
        mark_static(tensor, 0)
    q, k, v = q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
    return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)[:, :, 0]


# --- masks ----------------------------------------------------------------------------------------
# Made uncompiled: that needs a byte for each pair of query and key, 256 MiB for the largest
# batch of the default preset, and spares a compilation for each kind of shape.


def packed_mask(call: PackedPrefill) -> BlockMask:
    """Query row i sees the key rows first[i] … last[i]: its own sequence's, up to the diagonal."""
    total_q, device = call.q.shape[0], call.q.device
    # A padding row sees none.
    first = torch.zeros(total_q, dtype=torch.int32)
    last = torch.full_like(first, -1)
    q_starts, k_starts = ([0, *accumulate(lengths)] for lengths in (call.q_lens, call.k_lens))
    for q_start, k_start, q_len, k_len in zip(
        q_starts, k_starts, call.q_lens, call.k_lens, strict=False
    ):
        rows = slice(q_start, q_start + q_len)
        first[rows] = k_start
        last[rows] = k_start + k_len - 1
        if call.causal:
            last[rows] -= torch.arange(q_len - 1, -1, -1, dtype=torch.int32)
    first, last = first.to(device), last.to(device)

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (first[i] <= j) & (j <= last[i])

    return create_block_mask(visible, None, None, total_q, call.k.shape[0], device=device)


def length_mask(call: PagedDecode) -> BlockMask:
    """Each sequence's one query sees that sequence's keys, and none of the padding behind them."""
    used = call.seqused_k

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return j < used[b]

    count = len(call.q_lens)
    return create_block_mask(visible, count, None, 1, call.max_seqlen_k, device=used.device)


def padded_rows(call: PagedDecode) -> torch.Tensor:
    """int64 [sequences, max_seqlen_k]: rows of the flattened cache.

    Padding repeats the sequence's last key: what stands in unused pages could be NaN, and
    0 · NaN is NaN.
    """
    position = torch.arange(call.max_seqlen_k, device=call.seqused_k.device)
    position = torch.minimum(position, call.seqused_k[:, None].long() - 1)
    pages = call.block_table.long().gather(1, position // call.page_size)
    return pages * call.page_size + position % call.page_size
