"""The operator `rlbench::attention_backward`, and how autograd gets to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlbench.kernels.attention import backward
from rlbench.kernels.attention.checks import check_backward, is_readable
from rlbench.kernels.attention.launch import KEPT, Plan, Runner
from rlbench.kernels.attention.operator import entry, signature

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

_plans: dict[tuple[object, ...], Runner] = {}
"""By all that `check_backward` looks at."""


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    causal: bool,
    softmax_scale: float,
) -> None:
    tensors = q, k, v, out, lse, dout, dq, dk, dv, cu_seqlens_q, cu_seqlens_k
    key = (max_seqlen_q, causal, softmax_scale, *map(signature, tensors))
    runner = _plans.get(key)
    if runner is None:
        check_backward(*tensors, max_seqlen_q, causal, softmax_scale)
        sequences = cu_seqlens_q.shape[0] - 1
        rest = sequences, max_seqlen_q, causal, softmax_scale
        request = backward.Backward(q, k, v, out, dout, dq, dk, dv, *rest)
        if len(_plans) >= KEPT:
            _plans.clear()
        runner = _plans[key] = Runner(_plan(request))
    if runner.is_empty:
        return
    pointers = [tensor.data_ptr() for tensor in tensors]
    if any(pointer % 16 for pointer in pointers[: backward.DELTA]):
        raise ValueError(
            "q, k, v, out, lse, dout, dq, dk and dv must start on 16-byte boundaries; they are at "
            f"{[hex(pointer) for pointer in pointers[: backward.DELTA]]}"
        )
    pointers.insert(backward.DELTA, 0)
    with torch.cuda.device(runner.device):
        runner(*pointers)


def _plan(request: backward.Backward) -> Plan:
    if request.q.shape[0] == 0 or request.sequences == 0 or request.max_seqlen_q == 0:
        return Plan(request.device, (), 0)
    with torch.cuda.device(request.device):
        return backward.plan(request)


_NAME = "rlbench::attention_backward"
torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor(a!) dq, "
    "Tensor(b!) dk, Tensor(c!) dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "bool causal, float softmax_scale) -> ()",
)
torch.library.impl(_NAME, "default", _backward)
torch.library.register_fake(_NAME, check_backward)
attention_backward = torch.ops.rlbench.attention_backward.default


def differentiable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    splits: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """`attention` of packed sequences, which has gradients, and its log-sum-exp, which has none."""
    rest = max_seqlen_q, splits, causal, softmax_scale
    both: tuple[Tensor, Tensor] = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, cu_seqlens_q, cu_seqlens_k, *rest
    )
    return both


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        splits: int,
        causal: bool,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        lengths = cu_seqlens_q, cu_seqlens_k
        rest = max_seqlen_q, splits, causal, softmax_scale
        entry(q)(q, k, v, out, lse, *lengths, None, None, *rest)
        ctx.save_for_backward(q, k, v, out, lse, *lengths)
        ctx.rest = max_seqlen_q, causal, softmax_scale  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        # Zeros for rows that belong to no sequence.
        dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        if not is_readable(dout):
            dout = dout.contiguous()
        attention_backward(
            q, k, v, out, lse, dout, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, *ctx.rest
        )
        return dq, dk, dv, *(None for _ in range(6))
