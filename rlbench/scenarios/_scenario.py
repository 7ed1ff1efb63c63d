"""The contract of a scenario: one question, asked of any engine about any op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlbench.ops._op import Kernel, Outputs, Workload


@dataclass(frozen=True)
class Context:
    """What a scenario is handed inside the worker."""

    workload: Workload
    kernel: Kernel
    passes: tuple[str, ...]
    """The passes asked for; questions about others are left out."""
    device: str
    elsewhere: Callable[[str], Outputs]
    """Variation name -> the outputs of its `actual` trial, computed in another process."""
    ceilings: Callable[[], dict[str, float]]
    """This device's measured ceilings: `tflops`, `gbps`."""
    tell: Callable[[str], None]
    """Says what is being done right now, for the live display."""
    keep: Callable[[str, torch.Tensor], None] = lambda _name, _tensor: None
    """Saves a tensor under its digest's name, where the user asked for outputs to be saved."""


@dataclass(frozen=True)
class Scenario:
    """A question. The module's file name, with dashes, is the scenario's name."""

    question: str
    kind: str
    """`invariance`, `accuracy` or `latency`: which fields its results carry."""
    measure: Callable[[Context], dict[str, Any]]
    """The result's fields. Raises Unsupported if the engine can answer nothing of it."""
