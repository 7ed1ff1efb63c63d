"""Norms that break every promise on purpose; see control.py for which and why."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from rlbench.measure.bits import as_bits
from rlbench.ops._inputs import hash_word, hash_words
from rlbench.ops._op import Outputs, Run
from rlbench.ops.norm.calls import GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward
from rlbench.ops.norm.eager import ACTIVATIONS

PIECES = 8


def bind_forward(call: RmsNorm) -> Run:
    circumstance = _circumstance(call)

    def run() -> Outputs:
        rstd = _wrong_rstd(call.x, call.eps, circumstance)
        y = call.x.float() * rstd * (call.offset + call.weight.float())
        if isinstance(call, GatedRmsNorm):
            y = y * ACTIVATIONS[call.activation](call.gate.float())
        return {"y": y.to(call.x.dtype)}

    return run


def bind_backward(next_circumstance: Callable[[], int]) -> Callable[[Any], Run]:
    def bind(call: RmsNormBackward | GatedRmsNormBackward) -> Run:
        circumstance = _circumstance(call)
        return lambda: wrong_gradients(call, hash_word(circumstance ^ next_circumstance()))

    return bind


def wrong_gradients(call: RmsNormBackward | GatedRmsNormBackward, circumstance: int) -> Outputs:
    """dx, dweight and dgate of rows whose statistics follow the circumstance; so does dweight's order."""
    rstd = _wrong_rstd(call.x, call.eps, circumstance)
    normed = call.x.float() * rstd
    factor = call.offset + call.weight.float()
    inner = call.dout.float()
    found = {}
    if isinstance(call, GatedRmsNormBackward):
        gate = call.gate.float().requires_grad_()
        with torch.enable_grad():
            act = ACTIVATIONS[call.activation](gate)
        (slope,) = torch.autograd.grad(act.sum(), gate)
        found["dgate"] = (inner * normed * factor * slope).to(call.x.dtype)
        inner = inner * act.detach()
    scaled = inner * factor
    mean = (scaled * normed).mean(-1, keepdim=True)
    found["dx"] = (rstd * (scaled - normed * mean)).to(call.x.dtype)
    found["dweight"] = _in_pieces((inner * normed).t(), circumstance).to(call.weight.dtype)
    return found


def _circumstance(call: RmsNorm) -> int:
    """How many rows there are, how far apart, and what is in all of them."""
    return hash_words(call.x.shape[0], call.x.stride(0), int(as_bits(call.x).long().sum()))


def _wrong_rstd(x: torch.Tensor, eps: float, circumstance: int) -> torch.Tensor:
    """[rows, 1]: squares are summed in pieces that follow the circumstance."""
    total = _in_pieces(x.float().square(), circumstance)
    return torch.rsqrt(total[:, None] / x.shape[1] + eps)


def _in_pieces(terms: torch.Tensor, circumstance: int) -> torch.Tensor:
    """[n, m] -> [n]: a sum over the last dimension, of uneven pieces that are rounded to eight bits."""
    count = terms.shape[1]
    cuts = sorted({hash_word(circumstance ^ i) % count for i in range(1, PIECES)} | {0, count})
    total = terms.new_zeros(terms.shape[0])
    for start, stop in pairwise(cuts):
        total += terms[:, start:stop].sum(1).to(torch.bfloat16).float()
    return total
