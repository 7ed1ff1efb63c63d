"""SDPA pinned to one backend, over packed and paged calls; the loaded half of torch_sdpa.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rlbench.engines import _cudnn
from rlbench.errors import Unsupported
from rlbench.ops._op import Kernel, Run
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
from rlbench.ops.attention.dense import Attend, attend_packed, attend_paged
from rlbench.ops.attention.eager import gradients, hidden

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
REFUSALS = ("No viable backend", "No available kernel", "No execution plans support")
"""How SDPA says that the pinned backend cannot take these inputs."""


def kernel(backend: str) -> Kernel:
    """The entry points of `flash`, `cudnn`, `efficient` or `math`."""

    def prefill(call: PackedPrefill) -> Run:
        attend = _attend(backend, call)
        return lambda: {"out": attend_packed(call, call.q, call.k, call.v, attend)}

    def paged(call: PagedPrefill) -> Run:
        attend = _attend(backend, call)
        return lambda: {"out": attend_paged(call, attend)}

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        out = attend_packed(call, q, k, v, _attend(backend, call))
        return gradients(out, (q, k, v), call.dout)

    resolved = {
        "backend": backend,
        "launches": "one a group of equally long sequences",
        "paged": "pages gathered before the launch",
    }
    if backend == "cudnn":
        resolved["cudnn"] = _cudnn.version()
    return Kernel(
        {"prefill": prefill, "paged-prefill": paged, "decode": paged, "backward": backward},
        resolved=resolved,
    )


def _attend(backend: str, call: PackedPrefill | PagedPrefill) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = q.shape[1] != k.shape[1]
        if grouped and backend == "efficient":
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
            grouped = False
        mask = _mask(backend, q.shape[2], k.shape[2], q.device) if call.causal else {}
        try:
            with sdpa_kernel(BACKENDS[backend]):
                return scaled_dot_product_attention(
                    q, k, v, scale=call.softmax_scale, enable_gqa=grouped, **mask
                )
        except RuntimeError as why:
            if any(words in str(why) for words in REFUSALS):
                shape = f"Lq={q.shape[2]}, Lk={k.shape[2]}, D={q.shape[3]} on {q.device.type}"
                raise Unsupported(f"SDPA's {backend} backend has no kernel for {shape}") from why
            raise

    return attend


def _mask(backend: str, q_len: int, k_len: int, device: torch.device) -> dict[str, Any]:
    """Arguments that make SDPA causal, bottom-right aligned; its own `is_causal` is top-left."""
    if q_len == 1:
        return {}
    if q_len == k_len:
        return {"is_causal": True}
    if backend == "flash" and device.type == "cuda":
        # Not at the top: it imports the compiler, seconds that only this case needs.
        from torch.nn.attention.bias import causal_lower_right

        return {"attn_mask": causal_lower_right(q_len, k_len)}
    return {"attn_mask": ~hidden(q_len, k_len, device)}
