"""The control: wrong on purpose, in one way a scenario, so that a scenario proves it can tell.

For attention it computes what plain torch does, over splits of the keys whose partial results
are rounded to the case's dtype, and lets decide what nothing should:

| scenario | what is wrong |
| --- | --- |
| batch | the splits' borders follow the number of query rows in the batch, padding included |
| chunked-prefill | so it follows the chunk, and the pages' numbers where keys are paged |
| decode | and the page size, and the values in slots that no key uses |
| backward | gradients are summed over blocks in an order that changes with every call |

For norms it adds up squares, and a weight's gradient, in pieces that are rounded and whose borders follow

| scenario | what |
| --- | --- |
| batch | the number of rows, how far apart they lie, and what is in all of them |
| backward | and the number of the call |

Circumstances are hashed, not drawn, so that the control's own results are the same in every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING

from rlbench.engines._engine import PROCESS_NUMBER, Engine

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.engines import _control_attention as wrong
    from rlbench.ops._op import Kernel

    return Kernel(
        {
            "prefill": wrong.bind_prefill,
            "paged-prefill": wrong.bind_paged,
            "decode": wrong.bind_paged,
            "backward": wrong.bind_backward(_numbers()),
        }
    )


def load_norm(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.engines import _control_norm as wrong
    from rlbench.ops._op import Kernel
    from rlbench.ops.norm.calls import by_entry

    return Kernel(by_entry(wrong.bind_forward, wrong.bind_backward(_numbers())))


def _numbers() -> Callable[[], int]:
    """Another one with every call. Another process is another circumstance, so it starts elsewhere."""
    from rlbench.ops._inputs import hash_word

    calls = count(1 + 1000 * int(os.environ.get(PROCESS_NUMBER, "0")))
    return lambda: hash_word(next(calls))


ENGINE = Engine(
    summary="wrong on purpose in one way a scenario; must fail",
    distribution="torch",
    modules=("torch",),
    install="pip install 'torch>=2.9'",
    load={"attention": load_attention, "norm": load_norm},
    devices=("cpu", "cuda"),
    is_control=True,
)
