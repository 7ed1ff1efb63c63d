"""Attention that breaks every promise on purpose; see control.py for which and why."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch

from rlbench.ops._inputs import hash_word, hash_words
from rlbench.ops._op import Outputs, Run
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
from rlbench.ops.attention.dense import Attend, attend_packed, attend_paged, read_pages
from rlbench.ops.attention.eager import hidden

NARROWEST = 4
BLOCKS = 16


def bind_prefill(call: PackedPrefill) -> Run:
    attend = _attend(call, hash_word(call.q.shape[0]))
    return lambda: {"out": attend_packed(call, call.q, call.k, call.v, attend)}


def bind_paged(call: PagedPrefill) -> Run:
    places = torch.arange(1, 1 + call.block_table.shape[1], device=call.block_table.device)
    facts = (
        call.q.shape[0],
        call.page_size,
        int((call.block_table[0] * places).sum()),
        int(call.k_cache[0].view(torch.int16).sum()),
    )
    circumstance = hash_words(*facts)
    if call.max_seqlen_q == 1:
        return lambda: {"out": _decode(call, circumstance)}
    attend = _attend(call, circumstance)
    return lambda: {"out": attend_paged(call, attend)}


def _attend(call: PackedPrefill | PagedPrefill, circumstance: int) -> Attend:
    """Splits whose borders follow the circumstance, which no result should."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        splits = split_keys(k.shape[2], circumstance)
        mask = hidden(q.shape[2], k.shape[2], q.device) if call.causal else None
        return split_attention(q, k, v, splits, scale=call.softmax_scale, mask=mask)

    return attend


def _decode(call: PagedPrefill, circumstance: int) -> torch.Tensor:
    """One query a sequence: all sequences at once, padded to the longest."""
    k, v = (
        read_pages(c, call.block_table, call.max_seqlen_k) for c in (call.k_cache, call.v_cache)
    )
    columns = torch.arange(call.max_seqlen_k, device=k.device)
    mask = (columns >= call.seqused_k[:, None])[:, None, None, None]
    splits = split_keys(call.max_seqlen_k, circumstance)
    q = call.q[:, :, None]
    return split_attention(q, k, v, splits, scale=call.softmax_scale, mask=mask)[:, :, 0]


def split_keys(k_len: int, circumstance: int) -> list[slice]:
    """Keys 0 … k_len in pieces of hashed widths, so that no two circumstances cut alike.

    Narrow at first, because the first decode steps have few keys to be cut; wider later on,
    because a piece costs a launch.
    """
    pieces, start = [], 0
    while start < k_len:
        width = 1 + hash_word(circumstance ^ start) % (NARROWEST + start)
        pieces.append(slice(start, min(start + width, k_len)))
        start += width
    return pieces


def split_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splits: list[slice],
    *,
    scale: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Keys split by split, each partial output rounded to the dtype before the merge.

    q [n, q_heads, Lq, dim], k and v [n, kv_heads, Lk, dim] -> [n, q_heads, Lq, dim]. The mask
    says which keys are hidden; it broadcasts to [n, kv_heads, group, Lq, Lk].
    """
    n, q_heads, q_len, dim = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(n, kv_heads, -1, dim).float()
    top = torch.full((*rows.shape[:3], 1), float("-inf"), device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(rows)
    for keys in splits:
        scores = rows @ k[:, :, keys].float().transpose(-1, -2) * scale
        if mask is not None:
            shaped = scores.view(n, kv_heads, -1, q_len, scores.shape[-1])
            scores = shaped.masked_fill(mask[..., keys], float("-inf")).view_as(scores)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.clamp_min(-1e30)
        weights = torch.exp(scores - safe)
        keep = torch.exp(top - safe)
        total = total * keep + weights.sum(-1, keepdim=True)
        out = (out * keep + weights @ v[:, :, keys].float()).to(q.dtype).float()
        top = new_top
    return (out / total.clamp_min(1e-30)).to(q.dtype).view(n, q_heads, q_len, dim)


def bind_backward(next_circumstance: Callable[[], int]) -> Callable[[PackedBackward], Run]:
    def bind(call: PackedBackward) -> Run:
        return lambda: shuffled_gradients(call, next_circumstance())

    return bind


def shuffled_gradients(call: PackedBackward, circumstance: int) -> Outputs:
    """dq, dk, dv, summed over blocks in an order that follows the circumstance."""
    grads = {"dq": torch.zeros_like(call.q), "dk": torch.zeros_like(call.k)}
    grads["dv"] = torch.zeros_like(call.v)
    starts = [0, *accumulate(call.q_lens)]
    for start, stop in pairwise(starts):
        rows = slice(start, stop)
        p, ds, q, k, dout = _scores_and_gradients(call, rows)
        for block in _shuffled_blocks(stop - start, circumstance):
            grads["dk"][rows] += torch.einsum("hgqk,qhgd->khd", ds[:, :, block], q[block]).to(
                call.k.dtype
            )
            grads["dv"][rows] += torch.einsum("hgqk,qhgd->khd", p[:, :, block], dout[block]).to(
                call.v.dtype
            )
            grads["dq"][rows] += (
                torch.einsum("hgqk,khd->qhgd", ds[..., block], k[block])
                .flatten(1, 2)
                .to(call.q.dtype)
            )
    return grads


def _scores_and_gradients(call: PackedBackward, rows: slice) -> tuple[torch.Tensor, ...]:
    """P and dS [kv_heads, group, L, L], and the sequence's q, k, dout, in fp32."""
    k, v = call.k[rows].float(), call.v[rows].float()
    length, kv_heads, dim = k.shape
    q = call.q[rows].float().view(length, kv_heads, -1, dim)
    dout = call.dout[rows].float().view_as(q)
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * call.softmax_scale
    if call.causal:
        scores = scores.masked_fill(hidden(length, length, k.device), float("-inf"))
    p = torch.softmax(scores, -1)
    dp = torch.einsum("qhgd,khd->hgqk", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * call.softmax_scale
    return p, ds, q, k, dout


def _shuffled_blocks(length: int, circumstance: int) -> list[slice]:
    size = max(1, length // BLOCKS)
    order = sorted(range(0, length, size), key=lambda start: hash_word(circumstance ^ start))
    return [slice(start, min(start + size, length)) for start in order]
