"""FlashAttention-4 (CuTe DSL): packed prefill, paged prefill and decode, backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Claim, Engine
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    from typing import Any

    import torch

    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from flash_attn.cute import flash_attn_varlen_func

    from rlbench.ops._op import Kernel, Run
    from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
    from rlbench.ops.attention.eager import gradients

    deterministic = "deterministic" in options

    def packed(call: PackedPrefill) -> Run:
        arguments = {**call.varlen(), "deterministic": deterministic}
        return lambda: {"out": attend(call.q, call.k, call.v, **arguments)}

    def paged(call: PagedPrefill) -> Run:
        pages = {"seqused_k": call.seqused_k, "page_table": call.block_table}
        arguments = {**call.varlen(), **pages}
        return lambda: {"out": attend(call.q, call.k_cache, call.v_cache, **arguments)}

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        out = attend(q, k, v, **call.varlen(), deterministic=deterministic)
        return gradients(out, (q, k, v), call.dout)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """The output alone: some calls return (out, lse)."""
        result = flash_attn_varlen_func(q, k, v, **arguments)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return Kernel(
        {"prefill": packed, "paged-prefill": paged, "decode": paged, "backward": backward},
        resolved={"num_splits": "1 (its default)", "deterministic": str(deterministic)},
    )


ENGINE = Engine(
    summary="FlashAttention-4 (CuTe DSL)",
    distribution="flash-attn-4",
    modules=("torch", "flash_attn.cute.interface", "cutlass"),
    install="uv pip install flash-attn-4==4.0.0b36",
    load={"attention": load_attention},
    variants=((), (("deterministic", ""),)),
    claims=(
        Claim(
            Property.BACKWARD_DETERMINISTIC,
            "the `deterministic` argument of flash_attn.cute.flash_attn_varlen_func",
            when={"deterministic": ""},
        ),
    ),
    min_capability=(9, 0),
)
