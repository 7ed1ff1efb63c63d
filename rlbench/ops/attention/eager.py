"""Attention in plain torch at the case's dtype: two matrix products around an fp32 softmax.

It is the `torch-eager` engine, and what every engine's accuracy is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlbench.ops import _runs
from rlbench.ops._op import Call, Outputs, Run
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
from rlbench.ops.attention.dense import Attend, attend_packed, attend_paged


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool
) -> torch.Tensor:
    """q [n, q_heads, Lq, dim], k and v [n, kv_heads, Lk, dim] -> [n, q_heads, Lq, dim].

    A group's query heads stand under one another as rows, so keys are not copied for them.
    """
    n, q_heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    rows = q.reshape(n, kv_heads, q_heads // kv_heads * q_len, dim)
    scores = (rows @ k.transpose(-1, -2)) * softmax_scale
    if causal and q_len > 1:
        scores = scores.view(n, q_heads, q_len, k_len)
        scores = scores.masked_fill(hidden(q_len, k_len, q.device), float("-inf"))
        scores = scores.view(n, kv_heads, -1, k_len)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return (weights @ v).view(n, q_heads, q_len, dim)


def hidden(q_len: int, k_len: int, device: torch.device) -> torch.Tensor:
    """[Lq, Lk], true where a bottom-right aligned causal mask hides the key."""
    last = torch.arange(q_len, device=device) + k_len - q_len
    return torch.arange(k_len, device=device) > last[:, None]


def bind_prefill(call: PackedPrefill) -> Run:
    return lambda: {"out": attend_packed(call, call.q, call.k, call.v, _attend(call))}


def bind_paged(call: PagedPrefill) -> Run:
    return lambda: {"out": attend_paged(call, _attend(call))}


def bind_backward(call: PackedBackward) -> Run:
    q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
    return gradients(attend_packed(call, q, k, v, _attend(call)), (q, k, v), call.dout)


def gradients(out: torch.Tensor, leaves: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Run:
    """Autograd's backward of `out`, of q, k and v."""
    return _runs.gradients(out, leaves, dout, ("dq", "dk", "dv"))


def compute(call: Call) -> Outputs:
    """The outputs of any attention call."""
    return ENTRIES[call.entry](call)()


ENTRIES: Mapping[str, Callable[[Any], Run]] = {
    "prefill": bind_prefill,
    "paged-prefill": bind_paged,
    "decode": bind_paged,
    "backward": bind_backward,
}


def _attend(call: PackedPrefill | PagedPrefill) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, softmax_scale=call.softmax_scale, causal=call.causal)

    return attend
