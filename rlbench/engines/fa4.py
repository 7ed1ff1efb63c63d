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

    def attend(
        call: PackedPrefill, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return first(
            flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=call.cu_seqlens_q,
                cu_seqlens_k=call.cu_seqlens_k,
                max_seqlen_q=call.max_seqlen_q,
                max_seqlen_k=call.max_seqlen_k,
                softmax_scale=call.softmax_scale,
                causal=call.causal,
                deterministic=deterministic,
            )
        )

    def packed(call: PackedPrefill) -> Run:
        return lambda: {"out": attend(call, call.q, call.k, call.v)}

    def paged(call: PagedPrefill) -> Run:
        return lambda: {
            "out": first(
                flash_attn_varlen_func(
                    call.q,
                    call.k_cache,
                    call.v_cache,
                    cu_seqlens_q=call.cu_seqlens_q,
                    max_seqlen_q=call.max_seqlen_q,
                    max_seqlen_k=call.max_seqlen_k,
                    seqused_k=call.seqused_k,
                    page_table=call.block_table,
                    softmax_scale=call.softmax_scale,
                    causal=call.causal,
                )
            )
        }

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        return gradients(attend(call, q, k, v), (q, k, v), call.dout)

    return Kernel(
        {"prefill": packed, "paged-prefill": paged, "decode": paged, "backward": backward},
        resolved={"num_splits": "1 (its default)", "deterministic": str(deterministic)},
    )


def first(result: Any) -> torch.Tensor:
    """The output alone: some calls return (out, lse)."""
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


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
