"""The norm in plain torch at the case's dtype, as model code without kernels has it.

It is the `torch-eager` engine, and what every engine's accuracy is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlbench.ops._op import Call, Outputs, Run
from rlbench.ops.norm.calls import GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward

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
Tensors = tuple[torch.Tensor, ...]
"""x and weight, and gate where there is one."""


def entries(function: Function) -> dict[str, Callable[[Any], Run]]:
    """What an engine offers that has a function like `rms_norm`, with autograd."""

    def forward(call: RmsNorm) -> Run:
        return inference(function, *_arguments(call))

    def backward(call: RmsNormBackward | GatedRmsNormBackward) -> Run:
        return gradients(function, *_arguments(call), call.dout)

    return {
        "forward": forward,
        "gated-forward": forward,
        "backward": backward,
        "gated-backward": backward,
    }


def inference(function: Function, tensors: Tensors, rest: Mapping[str, Any]) -> Run:
    """The forward as inference runs it, without autograd."""

    def run() -> Outputs:
        with torch.no_grad():
            return {"y": function(*tensors, **rest)}

    return run


def gradients(
    function: Function, tensors: Tensors, rest: Mapping[str, Any], dout: torch.Tensor
) -> Run:
    """Autograd's backward of the function, repeatable because the graph is kept."""
    leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors)
    out = function(*leaves, **rest)

    def run() -> Outputs:
        found = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return dict(zip(("dx", "dweight", "dgate"), found, strict=False))

    return run


def _arguments(call: RmsNorm) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    rest: dict[str, Any] = {"eps": call.eps, "offset": call.offset, "after_cast": call.after_cast}
    if isinstance(call, GatedRmsNorm):
        return (call.x, call.weight, call.gate), {**rest, "activation": call.activation}
    return (call.x, call.weight), rest


ENTRIES = entries(rms_norm)


def compute(call: Call) -> Outputs:
    """The outputs of any norm call."""
    return ENTRIES[call.entry](call)()
