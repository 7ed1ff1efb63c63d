"""torch.nn.functional.scaled_dot_product_attention, pinned to one of its backends.

SDPA knows dense batches only: equally long sequences share a launch, and a paged cache is
gathered first (that copy is part of its time). Grouped heads go through `enable_gqa`, except for
the efficient backend, which refuses it and gets its keys repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine, options_for
from rlbench.errors import Unsupported

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel

CUDA_ONLY = ("cudnn", "efficient")


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.engines import _torch_sdpa

    backend = options["backend"]
    if device == "cpu" and backend in CUDA_ONLY:
        raise Unsupported(f"SDPA's {backend} backend runs on CUDA devices only")
    return _torch_sdpa.kernel(backend)


ENGINE = Engine(
    summary="torch SDPA pinned to one backend",
    distribution="torch",
    modules=("torch",),
    install="pip install 'torch>=2.9'",
    load={"attention": load_attention},
    variants=options_for(backend=("flash", "cudnn", "efficient", "math")),
    devices=("cpu", "cuda"),
)
