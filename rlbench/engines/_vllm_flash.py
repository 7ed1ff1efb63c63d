"""vLLM's FlashAttention builds: what its FlashAttention-2 and -3 engines share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Claim
from rlbench.errors import Unavailable
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel

AUTO = 0
"""The value of num_splits that lets the library choose."""

VARIANTS = ((), (("splits", "1"),))
INSTALL = "uv pip install vllm==0.26.0"
CLAIMS = (
    Claim(
        Property.BATCH_INVARIANT,
        "https://docs.vllm.ai/en/latest/features/batch_invariance/ (the mode sets num_splits=1)",
        when={"splits": "1"},
    ),
)


def load_attention(fa_version: int, options: Mapping[str, str], device: str) -> Kernel:
    """Ragged prefill, and paged prefill and decode, through `flash_attn_varlen_func`."""
    from vllm.vllm_flash_attn import flash_attn_interface

    from rlbench.ops._op import Kernel, Run
    from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill

    # vLLM swallows the import error of its extension and keeps it here.
    reason = getattr(flash_attn_interface, f"FA{fa_version}_UNAVAILABLE_REASON")
    if reason:
        raise Unavailable(f"vLLM's FlashAttention-{fa_version} does not load: {reason}")
    attend = flash_attn_interface.flash_attn_varlen_func
    num_splits = int(options.get("splits", AUTO))

    chosen = {"num_splits": num_splits, "fa_version": fa_version}

    def packed(call: PackedPrefill) -> Run:
        arguments = {**call.varlen(), **chosen}
        return lambda: {"out": attend(call.q, call.k, call.v, **arguments)}

    def paged(call: PagedPrefill) -> Run:
        pages = {"seqused_k": call.seqused_k, "block_table": call.block_table}
        arguments = {**call.varlen(), **pages, **chosen}
        return lambda: {"out": attend(call.q, call.k_cache, call.v_cache, **arguments)}

    return Kernel(
        {"prefill": packed, "paged-prefill": paged, "decode": paged},
        unsupported={"backward": "vLLM's build is forward only"},
        resolved={"num_splits": "auto" if num_splits == AUTO else str(num_splits)},
    )
