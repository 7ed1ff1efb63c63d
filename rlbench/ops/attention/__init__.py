"""Attention: softmax(q kᵀ · scale) v over packed sequences, chunks, and a paged KV cache.

Causal and bottom-right aligned: with Lq queries and Lk keys, query i sees keys j ≤ i + Lk - Lq.
Query head h reads KV head h // (q_heads / kv_heads). scale = head_dim ** -0.5.

| file | holds |
| --- | --- |
| calls.py | what an engine is handed |
| inputs.py | the sequences, as exact integer arithmetic |
| layouts.py, paging.py | packing, paging |
| dense.py | packed calls as dense batches |
| sizes.py | how large the questions are, by preset |
| reference.py | the meaning, in fp64 |
| eager.py | the same in plain torch at the case's dtype |
| variations/ | what must not change the answer, a file for each scenario |
| workload.py | all of it for one case: variations, exams, latency points |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.ops._op import Case, Op

if TYPE_CHECKING:
    from rlbench.ops._op import Workload


def _load(case: Case, preset: str, device: str) -> Workload:
    from rlbench.ops.attention.workload import AttentionWorkload

    return AttentionWorkload(case, preset, device)


def _model(q_heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}


OP = Op(
    name="attention",
    summary="Softmax attention: packed prefill, paged decode, backward.",
    passes=("prefill", "decode", "backward"),
    scenarios={
        "batch": ("prefill",),
        "chunked-prefill": ("prefill",),
        "decode": ("decode",),
        "backward": ("backward",),
        "accuracy": ("prefill", "decode", "backward"),
        "latency": ("prefill", "decode", "backward"),
    },
    models={
        "tiny": _model(4, 2, 64),
        "qwen3-next": _model(16, 2, 256),
        "qwen3-next-tp4": _model(4, 1, 256),
        "qwen3-8b": _model(32, 8, 128),
        "llama3-70b-tp8": _model(8, 1, 128),
        "qwen3-0.6b": _model(16, 8, 128),
        "llama3.2-1b": _model(32, 8, 64),
        "gpt-oss-20b": _model(64, 8, 64),
    },
    default_cases={"cpu": ("tiny",), "cuda": ("qwen3-next", "qwen3-8b")},
    load=_load,
)
