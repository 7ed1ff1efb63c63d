"""vLLM's unified Triton attention: paged prefill and decode with one kernel.

It has two shapes. The segmented one (`3D` in vLLM) splits each sequence's keys 16 ways and adds
the parts up in a second kernel; it takes batches of one query a sequence that are too small to
fill the device without, if it is handed the workspace for it, as vLLM's backend does. The other
one (`2D`) walks over a sequence's keys in one go. VLLM_BATCH_INVARIANT=1 leaves only that, and
so does `splits=1` here, by handing over no workspace.

The causal mask is bottom-right aligned. Keys beyond a sequence's length are never loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from rlbench.engines._engine import Claim, Engine
from rlbench.errors import Unavailable
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    from typing import Any

    from rlbench.ops._op import Kernel

PAGE_SIZE = 16
"""vLLM's own default; of the pages a packed prefill's keys are put into."""


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    import torch
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops import triton_unified_attention

    from rlbench.ops._op import Kernel, Run
    from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill
    from rlbench.ops.attention.paging import to_pages

    segmented = "splits" not in options
    if segmented and triton_unified_attention.is_batch_invariant:
        raise Unavailable(
            "VLLM_BATCH_INVARIANT is set, which leaves vLLM only what vllm-triton:splits=1 runs; "
            "unset it"
        )
    attend = triton_unified_attention.unified_attention
    segments = triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    smallest_grid = triton_attn.MIN_LAUNCH_GRID_SIZE_2D

    def paged(call: PagedPrefill) -> Run:
        out = torch.empty_like(call.q)
        arguments = {
            **call.varlen(),
            "seqused_k": call.seqused_k,
            "block_table": call.block_table,
            "window_size": (-1, -1),
            "softcap": 0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            **(workspace(call) if segmented and call.max_seqlen_q == 1 else {}),
        }

        def run() -> dict[str, torch.Tensor]:
            attend(q=call.q, k=call.k_cache, v=call.v_cache, out=out, **arguments)
            return {"out": out}

        return run

    def workspace(call: PagedPrefill) -> dict[str, Any]:
        """What TritonAttentionMetadataBuilder allocates, and up to which batch size it is used.

        The builder rounds that size to one it captures graphs of, which changes nothing where the
        number of KV heads is a power of two.
        """
        rows, q_heads, head_dim = call.q.shape
        threshold = smallest_grid // call.k_cache.shape[2]
        # One row a query; more than vLLM's where padding rows follow the last query.
        parts = (max(threshold, rows), q_heads, segments)
        columns = 1 << (head_dim - 1).bit_length()
        fp32 = partial(call.q.new_empty, dtype=torch.float32)
        return {
            "seq_threshold_3D": threshold,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": fp32((*parts, columns)),
            "softmax_segm_max": fp32(parts),
            "softmax_segm_expsum": fp32(parts),
        }

    def packed(call: PackedPrefill) -> Run:
        return paged(to_pages(call, PAGE_SIZE))

    return Kernel(
        {"prefill": packed, "paged-prefill": paged, "decode": paged},
        unsupported={"backward": "vLLM's Triton attention is forward only"},
        resolved={
            "num_splits": f"{segments} with one query a sequence and at most "
            f"{smallest_grid} sequences x KV heads, else 1"
            if segmented
            else "1",
            "prefill": f"keys and values put into pages of {PAGE_SIZE} when bound",
        },
    )


ENGINE = Engine(
    summary="vLLM's unified Triton attention",
    distribution="vllm",
    modules=("torch", "triton", "vllm.v1.attention.backends.triton_attn"),
    install="uv pip install vllm==0.26.0",
    load={"attention": load_attention},
    variants=((), (("splits", "1"),)),
    claims=(
        Claim(
            Property.BATCH_INVARIANT,
            "https://docs.vllm.ai/en/v0.26.0/api/vllm/v1/attention/backends/triton_attn/ "
            "(supports_batch_invariance; the mode runs no segments)",
            when={"splits": "1"},
        ),
    ),
    min_capability=(8, 0),
)
