"""Runs of functions with autograd, whatever the op: what an engine's binders are made of."""

from __future__ import annotations

import torch

from rlbench.ops._op import Outputs, Run


def without_grad(run: Run) -> Run:
    """`run` as inference runs it: with autograd, an engine may store what a backward would need."""

    def inference() -> Outputs:
        with torch.no_grad():
            return run()

    return inference


def gradients(
    out: torch.Tensor,
    leaves: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    names: tuple[str, ...],
) -> Run:
    """Autograd's backward of `out`, repeatable because the graph is kept; a name for each leaf's."""

    def run() -> Outputs:
        grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        return dict(zip(names, grads, strict=True))

    return run
