"""An engine whose library is installed nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    raise AssertionError("never loaded")


ENGINE = Engine(
    summary="is never here",
    distribution="rlbench-fake",
    modules=("torch", "no_such_library.kernels"),
    install="pip install no-such-library",
    load={"attention": load_attention},
    devices=("cpu", "cuda"),
)
