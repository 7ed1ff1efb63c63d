"""RMSNorm of rows, zero-centred or not, gated or not.

y = x · rstd · (offset + w) [· act(gate)], rstd = 1 / √(mean(x²) + eps), over a row's `width` elements (Zhang
and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467). A zero-centred weight, as Gemma and
Qwen3-Next store it, has offset 1. Two conventions exist for the weight: multiplied in fp32 before the one cast
to the input's dtype, or after a cast to it, as Hugging Face's model code does; they are cases of their own.

| file | holds |
| --- | --- |
| calls.py | what an engine is handed |
| inputs.py | rows and weights, as exact integer arithmetic |
| sizes.py | how large the questions are, by preset |
| reference.py | the meaning, in fp64 |
| eager.py | the same in plain torch at the case's dtype |
| variations.py | what must not change the answer |
| workload.py | all of it for one case: variations, exams, latency points |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlbench.ops._op import Case, Op

if TYPE_CHECKING:
    from rlbench.ops._op import Workload


def _load(case: Case, preset: str, device: str) -> Workload:
    from rlbench.ops.norm.workload import NormWorkload

    return NormWorkload(case, preset, device)


def _plain(width: int, *, offset: int = 0, weight: str = "fp32") -> dict[str, Any]:
    return {"width": width, "heads": 1, "offset": offset, "weight": weight, "gate": "none"}


def _gated(width: int, heads: int, gate: str, *, weight: str = "fp32") -> dict[str, Any]:
    return {"width": width, "heads": heads, "offset": 0, "weight": weight, "gate": gate}


OP = Op(
    name="norm",
    summary="RMSNorm: zero-centred, gated, forward and backward.",
    passes=("forward", "backward"),
    scenarios={
        "batch": ("forward", "backward"),
        "backward": ("backward",),
        "accuracy": ("forward", "backward"),
        "latency": ("forward", "backward"),
    },
    # weight: fp32 if it is multiplied before the cast, after-cast if it is afterwards.
    models={
        "tiny": _plain(96),
        "tiny-zero-centred": _plain(96, offset=1),
        "tiny-gated": _gated(64, 4, "silu"),
        "qwen3-next": _plain(2048, offset=1),
        "qwen3-8b": _plain(4096),
        "qwen3-8b-hf": _plain(4096, weight="after-cast"),
        "qwen3-32b": _plain(5120),
        "llama3-70b": _plain(8192),
        "llama3-70b-hf": _plain(8192, weight="after-cast"),
        "qwen3-next-gated": _gated(128, 32, "silu"),
        "qwen3-next-gated-hf": _gated(128, 32, "silu", weight="after-cast"),
        "gated-256": _gated(256, 32, "sigmoid"),
    },
    default_cases={
        "cpu": ("tiny", "tiny-zero-centred", "tiny-gated"),
        "cuda": ("qwen3-next", "qwen3-8b", "qwen3-8b-hf", "qwen3-next-gated"),
    },
    dtypes=("bf16", "fp16", "fp32"),
    load=_load,
)
