"""The operator `rlbench::attention_forward`: how torch, eager or compiled, reaches the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # it is not public: a torch without it has the call recognized by its key
    TensorGuards = None  # type: ignore[assignment,misc]

from rlbench.kernels.attention import decode, generic, prefill, stream
from rlbench.kernels.attention.checks import check
from rlbench.kernels.attention.launch import KEPT, Plan, Runner
from rlbench.kernels.attention.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

_plans: dict[tuple[object, ...], Runner] = {}
"""By kind and all that `check` looks at; and by kind alone, that of the last call of this kind."""


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
    # A kind of call is recognized by what else it takes and by its tensors, all of which one function
    # of torch compares with those of the last call of this kind.
    kind = (
        max_seqlen_q,
        splits,
        causal,
        softmax_scale,
        lse is None,
        cu_seqlens_k is None,
        cu_seqlens_k is cu_seqlens_q,
        block_table is None,
        seqused_k is None,
    )
    tensors: tuple[Tensor, ...] = q, k, v, out, cu_seqlens_q
    if lse is not None:
        tensors += (lse,)
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:  # it takes none twice
        tensors += (cu_seqlens_k,)
    if block_table is not None:
        tensors += (block_table,)
    if seqused_k is not None:
        tensors += (seqused_k,)
    runner = _plans.get(kind)
    if runner is None or not runner.are_like(*tensors):
        rest = (max_seqlen_q, splits, causal, softmax_scale)
        checked = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, block_table, seqused_k, *rest)
        runner = _runner(kind, tensors, checked)
    pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
    if (pointers[0] | pointers[1] | pointers[2] | pointers[3]) % 16 != 0:
        addresses = dict(zip(("q", "k", "v", "out"), map(hex, pointers), strict=True))
        raise ValueError(
            f"q, k, v and out must start on 16-byte boundaries; they are at {addresses}"
        )
    if runner.is_empty:
        return
    lengths = cu_seqlens_k if block_table is None else seqused_k
    assert lengths is not None
    arguments = (
        *pointers,
        0 if lse is None else lse.data_ptr(),
        0,  # scratch memory
        cu_seqlens_q.data_ptr(),
        lengths.data_ptr(),
        0 if block_table is None else block_table.data_ptr(),
    )
    # What torch.cuda.current_device() asks for.
    if runner.device == torch._C._cuda_getDevice():  # noqa: SLF001
        runner(*arguments)
    else:
        with torch.cuda.device(runner.device):
            runner(*arguments)


def _runner(
    kind: tuple[object, ...], tensors: tuple[Tensor, ...], arguments: tuple[Any, ...]
) -> Runner:
    """Of a call that is not like the last one of its kind."""
    key = (*kind, *map(signature, tensors))
    runner = _plans.get(key)
    if runner is None:
        check(*arguments)
        q, k, v, out, _, cu_seqlens_q, _, block_table, _, *rest = arguments
        sequences = cu_seqlens_q.shape[0] - 1
        runner = Runner(_plan(Request(q, k, v, out, block_table, sequences, *rest)))
        _keep(key, runner)
    if not runner.are_like(*tensors):
        runner.are_like = _comparison(tensors)
    _keep(kind, runner)
    return runner


def _keep(key: tuple[object, ...], runner: Runner) -> None:
    if len(_plans) >= 2 * KEPT:
        _plans.clear()
    _plans[key] = runner


def _comparison(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """What says whether others have the same sizes, strides, dtypes and devices (and are looked at
    in the same way: not by inference mode, for one, if these are not)."""
    if TensorGuards is None:
        return lambda *_: False
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return guards.check


def signature(tensor: Tensor) -> tuple[object, ...]:
    """Whatever `check` looks at."""
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
