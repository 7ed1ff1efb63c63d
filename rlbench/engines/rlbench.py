"""The project's own CUDA kernels: packed prefill, paged prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Claim, Engine
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.kernels import attention
    from rlbench.kernels.attention.launch import hopper_is_on
    from rlbench.ops._op import Kernel, Run
    from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
    from rlbench.ops.attention.eager import gradients

    def packed(call: PackedPrefill) -> Run:
        arguments = call.varlen()
        return lambda: {"out": attention(call.q, call.k, call.v, **arguments)}

    def paged(call: PagedPrefill) -> Run:
        pages = {"seqused_k": call.seqused_k, "block_table": call.block_table}
        arguments = {**call.varlen(), **pages}
        return lambda: {"out": attention(call.q, call.k_cache, call.v_cache, **arguments)}

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        out = attention(q, k, v, **call.varlen())
        return gradients(out, (q, k, v), call.dout)

    return Kernel(
        {"prefill": packed, "paged-prefill": paged, "decode": paged, "backward": backward},
        resolved={"kernels for Hopper": "on" if hopper_is_on() else "off"},
    )


ENGINE = Engine(
    summary="the project's own kernels, bitwise invariant by definition",
    distribution="rlbench",
    modules=("torch", "cuda.core"),
    install="pip install 'rlbench[kernels]'",
    load={"attention": load_attention},
    claims=tuple(Claim(p, "docs/kernels/attention.md") for p in Property),
    min_capability=(8, 0),
)
