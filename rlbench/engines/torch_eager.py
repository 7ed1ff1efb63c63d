"""Plain torch, as model code without kernels has it: products around an fp32 softmax, a norm in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.ops._op import Kernel
    from rlbench.ops.attention import eager

    return Kernel(eager.ENTRIES, resolved={"launches": "one a group of equally long sequences"})


def load_norm(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.ops._op import Kernel
    from rlbench.ops.norm import eager

    return Kernel(
        eager.ENTRIES, resolved={"weight": "before or after the cast, as the case has it"}
    )


ENGINE = Engine(
    summary="plain torch: matmul and softmax, or a norm's own steps",
    distribution="torch",
    modules=("torch",),
    install="pip install 'torch>=2.9'",
    load={"attention": load_attention, "norm": load_norm},
    devices=("cpu", "cuda"),
)
