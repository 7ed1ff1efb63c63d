"""What attention means, in fp64, on the same low-precision inputs.

O = softmax(scale · Q Kᵀ + mask) V. With P the softmax and D = rowsum(dO ∘ O):
dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - D), dQ = scale · dS K, dK = scale · dSᵀ Q (the gradients of the
softmax as in Dao et al., "FlashAttention", arXiv 2205.14135, appendix B). Query blocks of bounded
size, so that 8192 tokens fit; no autograd, so that nothing is shared with what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from rlbench.ops._op import Outputs
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill

_SCORES = 1 << 27
"""fp64 scores held at once: 1 GiB."""


def forward(call: PackedPrefill | PagedPrefill) -> Outputs:
    """`out` [total_q, q_heads, head_dim] in fp64; rows that belong to no sequence are zero."""
    out = torch.zeros(call.q.shape, dtype=torch.float64, device=call.q.device)
    starts = [0, *accumulate(call.q_lens)]
    for i, (q_len, k_len) in enumerate(zip(call.q_lens, call.k_lens, strict=True)):
        k, v = _keys_and_values(call, i, k_len)
        q = call.q[starts[i] : starts[i] + q_len].double()
        for kv_head, heads in _heads(call.q.shape[1], k.shape[1]):
            for block, p in _probabilities(call, q[:, heads], k[:, kv_head]):
                out[starts[i] + block.start : starts[i] + block.stop, heads] = torch.einsum(
                    "gqk,kd->qgd", p, v[:, kv_head]
                )
    return {"out": out}


def backward(call: PackedBackward) -> Outputs:
    """`dq`, `dk`, `dv` in fp64, shaped as q, k, v."""
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float64) for t in (call.q, call.k, call.v))
    q_starts, k_starts = [0, *accumulate(call.q_lens)], [0, *accumulate(call.k_lens)]
    for i, (q_len, k_len) in enumerate(zip(call.q_lens, call.k_lens, strict=True)):
        keys = slice(k_starts[i], k_starts[i] + k_len)
        k, v = call.k[keys].double(), call.v[keys].double()
        q = call.q[q_starts[i] : q_starts[i] + q_len].double()
        dout = call.dout[q_starts[i] : q_starts[i] + q_len].double()
        for kv_head, heads in _heads(call.q.shape[1], k.shape[1]):
            for block, p in _probabilities(call, q[:, heads], k[:, kv_head]):
                rows = slice(q_starts[i] + block.start, q_starts[i] + block.stop)
                do, qb = dout[block, heads], q[block, heads]
                dp = torch.einsum("qgd,kd->gqk", do, v[:, kv_head])
                delta = (p * dp).sum(-1, keepdim=True)
                ds = p * (dp - delta) * call.softmax_scale
                dq[rows, heads] = torch.einsum("gqk,kd->qgd", ds, k[:, kv_head])
                dk[keys, kv_head] += torch.einsum("gqk,qgd->kd", ds, qb)
                dv[keys, kv_head] += torch.einsum("gqk,qgd->kd", p, do)
    return {"dq": dq, "dk": dk, "dv": dv}


def _keys_and_values(
    call: PackedPrefill | PagedPrefill, i: int, k_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(call, PackedPrefill):
        start = sum(call.k_lens[:i])
        return call.k[start : start + k_len].double(), call.v[start : start + k_len].double()
    table = call.block_table[i, : -(-k_len // call.page_size)].long()
    return (
        call.k_cache[table].flatten(0, 1)[:k_len].double(),
        call.v_cache[table].flatten(0, 1)[:k_len].double(),
    )


def _heads(q_heads: int, kv_heads: int) -> list[tuple[int, slice]]:
    group = q_heads // kv_heads
    return [(h, slice(h * group, (h + 1) * group)) for h in range(kv_heads)]


def _probabilities(
    call: PackedPrefill | PagedPrefill, q: torch.Tensor, k: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Query blocks of one KV head, each with its softmax P [group, block, keys].

    q [Lq, group, dim] and k [Lk, dim] in fp64. A row that sees no key has P = 0.
    """
    q_len, group, _ = q.shape
    k_len = k.shape[0]
    step = max(1, _SCORES // (group * k_len))
    columns = torch.arange(k_len, device=k.device)
    for start in range(0, q_len, step):
        block = slice(start, min(start + step, q_len))
        scores = torch.einsum("qgd,kd->gqk", q[block], k) * call.softmax_scale
        if call.causal:
            last = torch.arange(block.start, block.stop, device=k.device) + k_len - q_len
            scores.masked_fill_(columns > last[:, None], float("-inf"))
        yield block, torch.nan_to_num(torch.softmax(scores, -1), nan=0.0)
