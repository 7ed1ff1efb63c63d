"""An engine whose library never ends being imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    import rlbench_fake_stuck_library

    raise AssertionError(rlbench_fake_stuck_library)


ENGINE = Engine(
    summary="hangs while it is imported",
    distribution="rlbench-fake",
    modules=("rlbench_fake_stuck_library",),
    install="nothing brings it",
    load={"attention": load_attention},
    devices=("cpu", "cuda"),
)
