"""FlashAttention-3, in the build that vLLM ships: ragged prefill, paged prefill and decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines import _vllm_flash
from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    return _vllm_flash.load_attention(3, options, device)


ENGINE = Engine(
    summary="FlashAttention-3 (vLLM's build)",
    distribution="vllm",
    modules=("torch", "vllm.vllm_flash_attn._vllm_fa3_C"),
    install=_vllm_flash.INSTALL,
    load={"attention": load_attention},
    variants=_vllm_flash.VARIANTS,
    claims=_vllm_flash.CLAIMS,
    min_capability=(9, 0),
    max_capability=(9, 9),
)
