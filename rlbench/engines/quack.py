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

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
        assert offset == 0
        y: torch.Tensor = rmsnorm(x, weight, eps=eps)
        return y

    return Norms(norm).kernel()


ENGINE = Engine(
    summary="quack's RMSNorm in CuTe DSL",
    distribution="quack-kernels",
    modules=("torch", "quack.rmsnorm"),
    install="uv pip install quack-kernels==0.6.5",
    load={"norm": load_norm},
    min_capability=(9, 0),
)
