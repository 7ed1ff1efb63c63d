"""Plain torch through torch.compile: what a trainer gets without a kernel of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_norm(options: Mapping[str, str], device: str) -> Kernel:
    import torch

    from rlbench.ops._op import Kernel
    from rlbench.ops.norm.eager import entries, rms_norm

    # As a trainer has it: what comes with other sizes is compiled again, and then for all of them.
    return Kernel(entries(torch.compile(rms_norm)), resolved={"dynamic": "automatic"})


ENGINE = Engine(
    summary="plain torch through torch.compile",
    distribution="torch",
    modules=("torch", "torch._inductor"),
    install="pip install 'torch>=2.9'",
    load={"norm": load_norm},
)
