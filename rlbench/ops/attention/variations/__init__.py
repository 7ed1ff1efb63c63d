"""The circumstances that must not change a bit of the target's rows: a file for each scenario."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rlbench.ops._op import Variation
from rlbench.ops.attention.variations import backward, batch, chunked_prefill, decode
from rlbench.ops.attention.variations._around import Around

__all__ = ["SCENARIOS", "Around"]

SCENARIOS: Mapping[str, Callable[[Around], Iterator[Variation]]] = {
    "batch": batch.variations,
    "chunked-prefill": chunked_prefill.variations,
    "decode": decode.variations,
    "backward": backward.variations,
}
"""Scenario -> the circumstances it changes around one target sequence."""
