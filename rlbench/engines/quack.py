"""quack's RMSNorm, written in CuTe DSL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    import torch

    from rlbench.ops._op import Kernel


def load_norm(options: Mapping[str, str], device: str) -> Kernel:
    from quack.rmsnorm import rmsnorm

    from rlbench.engines._norm import Norms
    from rlbench.ops.norm.calls import RmsNorm

    def why_not(call: RmsNorm) -> str | None:
        return "adds no offset to the weight" if call.offset else None

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        y: torch.Tensor = rmsnorm(x, weight, eps=eps)
        return y

    return Norms(norm, why_not=why_not).kernel()


ENGINE = Engine(
    summary="quack's RMSNorm in CuTe DSL",
    distribution="quack-kernels",
    modules=("torch", "quack.rmsnorm"),
    install="uv pip install quack-kernels==0.6.5",
    load={"norm": load_norm},
    min_capability=(9, 0),
)
