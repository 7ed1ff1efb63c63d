"""What the norm means, in fp64, on the same low-precision inputs.

With v = offset + w, n = x · rstd, a = act(gate) (1 where there is no gate) and g = dy · a:
dweight = Σ over rows of g n, dx = rstd (g v - n · mean(g v n)), dgate = dy · n v · act'(gate), where
silu'(z) = s + z s (1 - s) and sigmoid'(z) = s (1 - s) with s = sigmoid(z): the chain rule, without autograd, so
that nothing is shared with what is tested. Where an engine rounds on the way is no part of the meaning.
"""

from __future__ import annotations

import torch

from rlbench.ops._op import Outputs
from rlbench.ops.norm.calls import GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward


def forward(call: RmsNorm) -> Outputs:
    """`y` [rows, width] in fp64."""
    normed, _ = _normalized(call)
    y = normed * _factor(call)
    if isinstance(call, GatedRmsNorm):
        y *= _activation(call)[0]
    return {"y": y}


def backward(call: RmsNormBackward | GatedRmsNormBackward) -> Outputs:
    """`dx`, `dweight` and, of a gated norm, `dgate`, in fp64."""
    normed, rstd = _normalized(call)
    factor, dout = _factor(call), call.dout.double()
    found = {}
    inner = dout
    if isinstance(call, GatedRmsNormBackward):
        act, slope = _activation(call)
        found["dgate"] = dout * normed * factor * slope
        inner = dout * act
    scaled = inner * factor
    found["dx"] = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    found["dweight"] = (inner * normed).sum(0)
    return found


def _normalized(call: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """x · rstd, and rstd [rows, 1]."""
    x = call.x.double()
    rstd = 1 / (x.square().mean(-1, keepdim=True) + call.eps).sqrt()
    return x * rstd, rstd


def _factor(call: RmsNorm) -> torch.Tensor:
    return call.offset + call.weight.double()


def _activation(call: GatedRmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """act(gate) and its derivative."""
    gate = call.gate.double()
    sigmoid = 1 / (1 + (-gate).exp())
    slope = sigmoid * (1 - sigmoid)
    if call.activation == "sigmoid":
        return sigmoid, slope
    return gate * sigmoid, sigmoid + gate * slope
