"""The norm in plain torch at the case's dtype, as model code without kernels has it.

It is the `torch-eager` engine, and what every engine's accuracy is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from rlbench.ops import _runs
from rlbench.ops._op import Call, Outputs, Run
from rlbench.ops._runs import without_grad
from rlbench.ops.norm.calls import (
    Binder,
    GatedRmsNormBackward,
    RmsNorm,
    RmsNormBackward,
    by_entry,
)

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float,
    after_cast: bool,
    activation: str = "silu",
) -> torch.Tensor:
    """x and gate [rows, width], weight [width] -> [rows, width] of x's dtype.

    An offset of 0 is not added: 0 + -0 would be +0.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if after_cast:
        y = wide.to(x.dtype) * (weight + offset if offset else weight)
    else:
        y = wide * (weight.float() + offset if offset else weight.float())
    if gate is not None:
        y = y.float() * ACTIVATIONS[activation](gate.float())
    return y.to(x.dtype)


Function = Callable[..., torch.Tensor]


def entries(function: Function) -> dict[str, Binder]:
    """What an engine offers that has a function like `rms_norm`, with autograd."""

    def with_cast(*tensors: torch.Tensor, call: RmsNorm) -> torch.Tensor:
        return function(*tensors, **call.arguments, after_cast=call.after_cast)

    return by_entry(
        lambda call: inference(call, partial(with_cast, call=call)),
        lambda call: gradients(call, partial(with_cast, call=call)),
    )


def inference(call: RmsNorm, function: Function) -> Run:
    """The forward of a function of the call's tensors."""
    return without_grad(lambda: {"y": function(*call.tensors)})


def gradients(call: RmsNormBackward | GatedRmsNormBackward, function: Function) -> Run:
    """Its backward, of each of them."""
    leaves = tuple(tensor.detach().requires_grad_() for tensor in call.tensors)
    return _runs.gradients(function(*leaves), leaves, call.dout, tuple(call.output_shapes))


ENTRIES = entries(rms_norm)


def compute(call: Call) -> Outputs:
    """The outputs of any norm call."""
    return ENTRIES[call.entry](call)()
