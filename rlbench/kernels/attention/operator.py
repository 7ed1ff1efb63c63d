"""The operator `rlbench::attention_forward`: how torch, eager or compiled, reaches the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlbench.kernels.attention import decode, generic, prefill, stream
from rlbench.kernels.attention.checks import check
from rlbench.kernels.attention.launch import KEPT, Plan, run, stream_of
from rlbench.kernels.attention.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

_plans: dict[tuple[object, ...], Plan] = {}


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    splits: int,
    causal: bool,
    softmax_scale: float,
) -> None:
    # Spelled out, because this is most of what a call costs: the key has whatever check() looks at.
    key = (
        q.shape,
        q.stride(),
        q.dtype,
        q.device,
        k.shape,
        k.stride(),
        k.dtype,
        k.device,
        v.shape,
        v.stride(),
        v.dtype,
        v.device,
        out.shape,
        out.stride(),
        out.dtype,
        out.device,
        cu_seqlens_q.shape,
        cu_seqlens_q.stride(),
        cu_seqlens_q.dtype,
        cu_seqlens_q.device,
        lse if lse is None else _signature(lse),
        cu_seqlens_k if cu_seqlens_k is None else _signature(cu_seqlens_k),
        block_table if block_table is None else _signature(block_table),
        seqused_k if seqused_k is None else _signature(seqused_k),
        max_seqlen_q,
        splits,
        causal,
        softmax_scale,
    )
    plan = _plans.get(key)
    if plan is None:
        rest = (max_seqlen_q, splits, causal, softmax_scale)
        check(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, *rest)
        plan = _plan(Request(q, k, v, out, block_table, cu_seqlens_q.shape[0] - 1, *rest))
        if len(_plans) >= KEPT:
            _plans.clear()
        _plans[key] = plan
    pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    if (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % 16 != 0:
        addresses = dict(zip(("q", "k", "v", "out"), map(hex, pointers), strict=True))
        raise ValueError(
            f"q, k, v and out must start on 16-byte boundaries; they are at {addresses}"
        )
    device, launches, work_size = plan
    if not launches:
        return
    lengths = cu_seqlens_k if block_table is None else seqused_k
    assert lengths is not None
    work = torch.empty(work_size, dtype=torch.float32, device=q.device) if work_size else None
    # Every parameter of the kernels is 8 bytes wide: ints become int64, floats double.
    arguments = (
        *pointers,
        0 if lse is None else lse.data_ptr(),
        0 if work is None else work.data_ptr(),
        cu_seqlens_q.data_ptr(),
        lengths.data_ptr(),
        0 if block_table is None else block_table.data_ptr(),
    )
    stream = stream_of(torch.cuda.current_stream(device).cuda_stream)
    if device == torch.cuda.current_device():
        run(stream, launches, arguments)
    else:
        with torch.cuda.device(device):
            run(stream, launches, arguments)


def _signature(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _plan(request: Request) -> Plan:
    """What a checked call launches. Here it is decided which source serves it."""
    if request.q.shape[0] == 0 or request.sequences == 0 or request.max_seqlen_q == 0:
        return Plan(request.device, (), 0)
    with torch.cuda.device(request.device):
        if decode.serves(request):
            return decode.plan(request)
        if stream.serves(request):
            return stream.plan(request)
        if prefill.serves(request):
            return prefill.plan(request)
        return generic.plan(request)


_NAME = "rlbench::attention_forward"
torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? block_table, Tensor? seqused_k, SymInt max_seqlen_q, "
    "SymInt splits, bool causal, float softmax_scale) -> ()",
)
torch.library.impl(_NAME, "default", _forward)
torch.library.register_fake(_NAME, check)
attention_forward = torch.ops.rlbench.attention_forward.default


def entry(q: Tensor) -> Callable[..., None]:
    """The operator, or its implementation where nobody looks: the way through the dispatcher and
    back to Python takes several microseconds, as long as a short decode step."""
    if (
        torch.compiler.is_compiling()
        or type(q) is not Tensor
        # A mode that traces or counts operators. There is no public way to ask.
        or torch._C._len_torch_dispatch_stack() > 0  # noqa: SLF001
    ):
        return attention_forward
    return _forward
