"""What a norm engine is handed: one dataclass an entry point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rlbench.ops._op import Run

Binder = Callable[[Any], Run]


@dataclass(frozen=True)
class RmsNorm:
    """Rows to normalize.

    x [rows, width], bf16, fp16 or fp32; rows may lie further apart than their width, each is contiguous.
    weight [width], of x's dtype. offset: added to the weight in fp32 where it is not 0. after_cast: the
    normalized row is rounded to x's dtype before the weight is multiplied. Output: `y`, shaped as x.
    """

    entry: ClassVar[str] = "forward"
    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    offset: float
    after_cast: bool

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"y": tuple(self.x.shape)}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a function of it takes first: x and weight, and gate where there is one."""
        return self.x, self.weight

    @property
    def arguments(self) -> dict[str, Any]:
        """And then, by name."""
        return {"eps": self.eps, "offset": self.offset}

    @property
    def sizes(self) -> dict[str, int]:
        """What of this call engines choose their path by."""
        rows, width = self.x.shape
        return {"rows": rows, "width": width, "row_stride": self.x.stride(0)}


@dataclass(frozen=True, kw_only=True)
class GatedRmsNorm(RmsNorm):
    """The same, times act(gate): gate [rows, width], of x's dtype; activation `silu` or `sigmoid`."""

    entry: ClassVar[str] = "gated-forward"
    gate: torch.Tensor
    activation: str

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.weight, self.gate

    @property
    def arguments(self) -> dict[str, Any]:
        return {**super().arguments, "activation": self.activation}


@dataclass(frozen=True, kw_only=True)
class RmsNormBackward(RmsNorm):
    """The gradients of a norm: `dx`, shaped as x, and `dweight`, as weight.

    dout [rows, width], of x's dtype. The forward belongs into the binding, the backward into the run.
    """

    entry: ClassVar[str] = "backward"
    dout: torch.Tensor

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"dx": tuple(self.x.shape), "dweight": tuple(self.weight.shape)}


@dataclass(frozen=True, kw_only=True)
class GatedRmsNormBackward(GatedRmsNorm):
    """The same of a gated norm, and `dgate`, shaped as gate."""

    entry: ClassVar[str] = "gated-backward"
    dout: torch.Tensor

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "dx": tuple(self.x.shape),
            "dweight": tuple(self.weight.shape),
            "dgate": tuple(self.gate.shape),
        }


def by_entry(forward: Binder, backward: Binder) -> dict[str, Binder]:
    """The entry points of an engine that binds norms with a gate and without in the same way."""
    return {
        RmsNorm.entry: forward,
        GatedRmsNorm.entry: forward,
        RmsNormBackward.entry: backward,
        GatedRmsNormBackward.entry: backward,
    }
