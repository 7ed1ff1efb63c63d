"""SageAttention 1: queries and keys quantized to int8 by block, in Triton.

Forward only, head dims 64 and 128. Its causal mask is for as many queries as keys; one query a
sequence needs none, and shorter queries in between it cannot mask. Before quantizing it takes the
keys' mean over all packed sequences and subtracts it from `k` **in place**, so it is handed a copy
at every run, which is part of its time. Version 2 has to be compiled and is not covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine
from rlbench.errors import Unsupported

if TYPE_CHECKING:
    import torch

    from rlbench.ops._op import Kernel, Run
    from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill

HEAD_DIMS = (64, 128)


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from sageattention import sageattn_varlen

    from rlbench.engines import _triton
    from rlbench.ops._op import Kernel
    from rlbench.ops.attention.paging import unpage

    _triton.need_c_compiler()

    def packed(call: PackedPrefill) -> Run:
        arguments = _arguments(call)

        def run() -> dict[str, torch.Tensor]:
            return {"out": sageattn_varlen(call.q, call.k.clone(), call.v, **arguments)}

        return run

    def decode(call: PagedPrefill) -> Run:
        same, copy = unpage(call)
        arguments = _arguments(same)
        return lambda: {"out": sageattn_varlen(call.q, *copy(), **arguments)}

    return Kernel(
        {"prefill": packed, "decode": decode},
        unsupported={
            "paged-prefill": "SageAttention reads no pages",
            "backward": "SageAttention is forward only",
        },
        resolved={
            "smooth_k": "True (its default): the mean over the whole batch is taken off the keys",
            "decode": "keys copied out of the pages at every run",
        },
    )


def _arguments(call: PackedPrefill) -> dict[str, object]:
    """What `sageattn_varlen` takes by name. Raises Unsupported for what it would get wrong."""
    head_dim = call.q.shape[2]
    if head_dim not in HEAD_DIMS:
        raise Unsupported(f"SageAttention has no variable-length kernel for head dim {head_dim}")
    if call.q.shape[0] != sum(call.q_lens):
        raise Unsupported("SageAttention's output has no rows beyond the last sequence")
    one_query = call.max_seqlen_q == 1
    if call.causal and not one_query and call.q_lens != call.k_lens:
        raise Unsupported("SageAttention's causal mask needs as many queries as keys")
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
        "is_causal": call.causal and not one_query,
        "sm_scale": call.softmax_scale,
    }


ENGINE = Engine(
    summary="SageAttention 1, int8 queries and keys",
    distribution="sageattention",
    modules=("torch", "triton", "sageattention.core"),
    install="uv pip install sageattention==1.0.6",
    load={"attention": load_attention},
    min_capability=(8, 0),
)
