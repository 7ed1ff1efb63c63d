"""An engine that lives in another interpreter only, where rlbench is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel

PARENTS = ("typer", "rich", "pydantic", "pytest")


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    import rlbench_fake_home  # type: ignore[import-not-found]

    from rlbench.ops._op import Kernel
    from rlbench.ops.attention import eager

    seen = [name for name in PARENTS if find_spec(name)]
    return Kernel(
        eager.ENTRIES,
        resolved={"home": rlbench_fake_home.NAME, "sees": " ".join(seen) or "nothing"},
    )


ENGINE = Engine(
    summary="lives elsewhere",
    distribution="rlbench-fake",
    modules=("torch", "rlbench_fake_home"),
    install="tests/fake/interpreters.py makes a home for it",
    load={"attention": load_attention},
    devices=("cpu", "cuda"),
)
