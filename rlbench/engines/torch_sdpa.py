"""torch.nn.functional.scaled_dot_product_attention, pinned to one of its backends.

SDPA knows dense batches only: equally long sequences share a launch, and a paged cache is
gathered first (that copy is part of its time). Grouped heads go through `enable_gqa`, except for
the efficient backend, which refuses it and gets its keys repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine, options_for
from rlbench.errors import Unsupported

if TYPE_CHECKING:
    import torch

    from rlbench.ops._op import Kernel

BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}

CUDA_ONLY = ("cudnn", "efficient")


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from rlbench.ops._op import Kernel, Run
    from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
    from rlbench.ops.attention.dense import Attend, attend_packed, attend_paged
    from rlbench.ops.attention.eager import gradients, hidden

    name = options["backend"]
    backend = getattr(SDPBackend, BACKENDS[name])
    if device == "cpu" and name in CUDA_ONLY:
        raise Unsupported(f"SDPA's {name} backend runs on CUDA devices only")

    def mask(q_len: int, k_len: int, where: torch.device) -> dict[str, object]:
        if q_len == 1:
            return {}
        if q_len == k_len:
            return {"is_causal": True}
        if name == "flash" and where.type == "cuda":
            # Not at the top: it imports the compiler, seconds that only this case needs.
            from torch.nn.attention.bias import causal_lower_right

            return {"attn_mask": causal_lower_right(q_len, k_len)}
        return {"attn_mask": ~hidden(q_len, k_len, where)}

    def attend_with(call: PackedPrefill | PagedPrefill) -> Attend:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            grouped = q.shape[1] != k.shape[1]
            if grouped and name == "efficient":
                k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
                grouped = False
            try:
                with sdpa_kernel(backend):
                    return scaled_dot_product_attention(
                        q,
                        k,
                        v,
                        scale=call.softmax_scale,
                        enable_gqa=grouped,
                        **mask(q.shape[2], k.shape[2], q.device) if call.causal else {},
                    )
            except RuntimeError as why:
                if is_refusal(why):
                    shape = f"Lq={q.shape[2]}, Lk={k.shape[2]}, D={q.shape[3]} on {q.device.type}"
                    raise Unsupported(f"SDPA's {name} backend has no kernel for {shape}") from why
                raise

        return attend

    def prefill(call: PackedPrefill) -> Run:
        return lambda: {"out": attend_packed(call, call.q, call.k, call.v, attend_with(call))}

    def paged(call: PagedPrefill) -> Run:
        return lambda: {"out": attend_paged(call, attend_with(call))}

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        return gradients(attend_packed(call, q, k, v, attend_with(call)), (q, k, v), call.dout)

    return Kernel(
        {"prefill": prefill, "paged-prefill": paged, "decode": paged, "backward": backward},
        resolved={
            "backend": BACKENDS[name],
            "launches": "one a group of equally long sequences",
            "paged": "pages gathered before the launch",
        },
    )


def is_refusal(error: RuntimeError) -> bool:
    """Whether SDPA said that the pinned backend cannot take these inputs."""
    text = str(error)
    return any(
        words in text
        for words in ("No viable backend", "No available kernel", "No execution plans support")
    )


ENGINE = Engine(
    summary="torch SDPA pinned to one backend",
    distribution="torch",
    modules=("torch",),
    install="pip install 'torch>=2.9'",
    load={"attention": load_attention},
    variants=options_for(backend=tuple(BACKENDS)),
    devices=("cpu", "cuda"),
)
