"""torch.nn.attention.flex_attention, compiled: packed prefill, decode, backward.

Packed sequences are one long one, cut up by a block mask: a query sees the keys of its own
sequence up to the diagonal, which is bottom-right aligned. flex has no paged cache outside of
torch.nn.attention.experimental, so decode gathers the pages first (that copy is part of its
time) and pads the sequences to the longest, as its flex-decoding kernel takes them.

CUDA only. On the CPU it is forward only, takes seconds of a C++ compiler for every kind of shape,
and in torch 2.13 the code generated for decode with a changing batch size does not compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.engines import _flex, _triton

    _triton.need_c_compiler()
    return _flex.kernel()


ENGINE = Engine(
    summary="torch FlexAttention, compiled",
    distribution="torch",
    modules=("torch", "triton"),
    install="pip install 'torch>=2.9'",
    load={"attention": load_attention},
    min_capability=(8, 0),
)
