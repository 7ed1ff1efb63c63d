"""Attention forward whose bits depend on a row's own data and position alone.

`docs/kernels/attention.md` has the promise; the head of `attention_generic.cu` has the definition
of the result. A call goes through `operator.py` (what torch sees), `checks.py`, the Python file
beside the `.cu` source that serves it (`generic.py`, `prefill.py`, `decode.py`, `stream.py`) and `launch.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from rlbench.kernels.attention import backward, combine, decode, generic, prefill, stream
from rlbench.kernels.attention.generic import Variant
from rlbench.kernels.attention.gradient import differentiable
from rlbench.kernels.attention.operator import entry
from rlbench.kernels.attention.request import HEAD_DIMS, split_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.launch import Build

__all__ = ["HEAD_DIMS", "Variant", "attention", "builds"]


def builds() -> Iterator[Build]:
    """Every build that a call can ask for."""
    yield from generic.variants()
    yield from decode.variants()
    yield from stream.variants()
    yield from combine.variants()
    yield from prefill.variants()
    yield from backward.variants()
    yield from backward.hopper_variants()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over packed sequences, against packed or paged keys and values.

    A row of the result has the same bits alone or in any batch, in a whole prefill, any chunk of it
    or a decode step, and for any page size and page order.

    Runs on the tensors' device and its current stream, never waits for the GPU, and can be captured
    in a CUDA graph once the same kind of call (head dim, dtype, paged or packed) has run on that
    device, because the first one compiles.

    With packed keys and values it can be differentiated once: the gradients of q, k and v are a function
    of the sequence alone, too. The log-sum-exp cannot.

    Args:
        q: `[total_q, q_heads, head_dim]`, bfloat16 or float16; head_dim 64, 128 or 256. The queries
            of all sequences one after the other. Query head h attends to KV head
            h // (q_heads // kv_heads).
        k: packed `[total_k, kv_heads, head_dim]`, or with `block_table` the page pool
            `[pages, page_size, kv_heads, head_dim]`, of q's dtype. What lies in unused slots of a
            page, or past a sequence's end, is never read.
        v: shaped like k. Must be finite wherever a key belongs to a sequence.
        cu_seqlens_q: `[sequences + 1]`, int32: sequence b has the queries
            `cu_seqlens_q[b] : cu_seqlens_q[b + 1]`. Other rows of out and lse are not written.
        cu_seqlens_k: `[sequences + 1]`, int32: the same for packed keys.
        max_seqlen_q: no sequence has more queries; later ones of a longer sequence would be left
            out. It decides only how many blocks start.
        max_seqlen_k: no sequence has more keys; the most that the shapes allow unless given. It
            decides only how many blocks start and how much scratch memory they get. Rows of a
            sequence that has more keys, beyond the split (2304 keys, or 2240 at head dim 256) that
            it ends in, may become NaN.
        block_table: `[sequences, max_pages]`, int32: the pages of each sequence in order. Entries
            beyond a sequence's last page are never read; the others must name pages of k.
        seqused_k: `[sequences]`, int32: with `block_table`, the number of keys of each sequence.
        causal: query i of a sequence of Lq queries and Lk keys sees the keys j <= i + Lk - Lq;
            otherwise it sees all.
        softmax_scale: what scores are multiplied by; positive; head_dim ** -0.5 unless given.
        return_lse: also return the log-sum-exp.
        out: written to and returned, shaped like q.

    Strides are free except that the last dimension is contiguous and every row starts on a 16-byte
    boundary.

    Returns:
        `out`, shaped like q in q's dtype; with `return_lse` also the natural log of the sum of
        exp(softmax_scale * score), `[total_q, q_heads]`, float32. A row that sees no key is 0 with
        an lse of -inf.

    Raises:
        TypeError, ValueError: an argument's type, dtype, device, shape, stride or value is wrong.
        NotImplementedError: a gradient through pages would be needed.
        KernelBuildError: the kernel cannot be compiled or loaded (see `rlbench.kernels.jit`).
    """
    needs_gradient = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    if needs_gradient and block_table is not None:
        raise NotImplementedError(
            "attention has no gradient of pages: call it under torch.no_grad(), detach q, k and v, or "
            "give packed keys and values with cu_seqlens_k"
        )
    if needs_gradient and out is not None:
        raise ValueError("out is given where a gradient is needed; leave it out, or detach q, k, v")
    if not isinstance(max_seqlen_q, (int, torch.SymInt)):
        raise TypeError(
            f"max_seqlen_q is a {type(max_seqlen_q).__name__}; it must be an int: reading it from "
            "a tensor would wait for the GPU"
        )
    shape = k.shape  # asked for once: that takes longer than what is done with it
    if softmax_scale is None:
        softmax_scale = float(shape[-1]) ** -0.5
    if needs_gradient and cu_seqlens_k is not None and seqused_k is None:
        lengths = cu_seqlens_q, cu_seqlens_k
        splits = _splits(shape, None, max_seqlen_k)
        both = differentiable(q, k, v, *lengths, max_seqlen_q, splits, causal, softmax_scale)
        return both if return_lse else both[0]
    if out is None:
        if q.is_contiguous():
            out = torch.empty_like(q)  # asking for the format takes half as long again
        else:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    entry(q)(
        q,
        k,
        v,
        out,
        lse,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table,
        seqused_k,
        max_seqlen_q,
        _splits(shape, block_table, max_seqlen_k),
        causal,
        softmax_scale,
    )
    return out if lse is None else (out, lse)


def _splits(shape: torch.Size, block_table: Tensor | None, max_seqlen_k: int | None) -> int:
    """No sequence has keys in more splits. Not the lengths: those change at every decode step."""
    most = shape[0] if block_table is None else block_table.shape[-1] * shape[1]
    if max_seqlen_k is not None:
        most = min(most, max_seqlen_k)
    return max(1, -(-most // split_keys(shape[-1])))
