"""torch's own fused function, F.rms_norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_norm(options: Mapping[str, str], device: str) -> Kernel:
    import torch

    from rlbench.engines._norm import Norms

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
        assert offset == 0
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    return Norms(norm).kernel()


ENGINE = Engine(
    summary="torch's fused F.rms_norm",
    distribution="torch",
    modules=("torch",),
    install="pip install 'torch>=2.9'",
    load={"norm": load_norm},
    devices=("cpu", "cuda"),
)
