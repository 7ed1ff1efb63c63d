"""Plain torch: two matrix products around an fp32 softmax, as model code without kernels has it."""

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


ENGINE = Engine(
    summary="plain torch matmul and softmax",
    distribution="torch",
    modules=("torch",),
    install="pip install 'torch>=2.9'",
    load={"attention": load_attention},
    devices=("cpu", "cuda"),
)
