"""The operator `rlbench::attention_forward`: how torch, eager or compiled, reaches the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from rlbench.kernels.attention import generic
from rlbench.kernels.attention.checks import check
from rlbench.kernels.attention.launch import KEPT, Plan, stream_of

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
    causal: bool,
    softmax_scale: float,
) -> None:
    tensors = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k)
    rest = (max_seqlen_q, causal, softmax_scale)
    key = (*map(_signature, tensors), *rest)
    plan = _plans.get(key)
    if plan is None:
        check(*tensors, *rest)
        plan = _plan(q, k, v, out, cu_seqlens_q.shape[0] - 1, block_table, *rest)
        if len(_plans) >= KEPT:
            _plans.clear()
        _plans[key] = plan
    pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    if (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % 16 != 0:
        addresses = dict(zip(("q", "k", "v", "out"), map(hex, pointers), strict=True))
        raise ValueError(
            f"q, k, v and out must start on 16-byte boundaries; they are at {addresses}"
        )
    device, kernel, config, launch, numbers = plan
    if launch is None:
        return
    lengths = cu_seqlens_k if block_table is None else seqused_k
    assert lengths is not None
    # Every parameter of the kernel is 8 bytes wide: ints become int64, floats double.
    arguments = (
        *pointers,
        0 if lse is None else lse.data_ptr(),
        cu_seqlens_q.data_ptr(),
        lengths.data_ptr(),
        0 if block_table is None else block_table.data_ptr(),
        *numbers,
    )
    stream = stream_of(torch.cuda.current_stream(device).cuda_stream)
    if device == torch.cuda.current_device():
        launch(stream, config, kernel, *arguments)
    else:
        with torch.cuda.device(device):
            launch(stream, config, kernel, *arguments)


def _signature(tensor: Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sequences: int,
    block_table: Tensor | None,
    max_seqlen_q: int,
    causal: bool,
    softmax_scale: float,
) -> Plan:
    """What a checked call launches. Here it is decided which source serves it: so far one."""
    if q.shape[0] == 0 or sequences == 0 or max_seqlen_q == 0:
        return Plan(q.device.index, None, None, None, ())
    with torch.cuda.device(q.device):
        return generic.plan(
            q, k, v, out, sequences, block_table, max_seqlen_q, causal, softmax_scale
        )


_NAME = "rlbench::attention_forward"
torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? block_table, Tensor? seqused_k, SymInt max_seqlen_q, "
    "bool causal, float softmax_scale) -> ()",
)
torch.library.impl(_NAME, "default", _forward)
torch.library.register_fake(_NAME, check)
attention_forward = torch.ops.rlbench.attention_forward.default
