"""What a call must satisfy, by shapes, dtypes, devices, strides and plain values.

Nothing here reads data, so fake tensors can be checked as well.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlbench.kernels.attention.request import ELEMENTS, HEAD_DIMS

_CHUNK = 8  # elements in a 16-byte access


def check(
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
    """Raises on whatever the kernel could not take; see `attention` for the arguments."""
    _check_query(q)
    _check_keys(q, k, v, paged=block_table is not None)
    if out.shape != q.shape:
        raise ValueError(
            f"out has shape {tuple(out.shape)} and q {tuple(q.shape)}; they must agree"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        _check_layout(name, tensor, q)
    if lse is not None and (
        lse.shape != q.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()
    ):
        raise ValueError(
            f"lse is {lse.dtype} {tuple(lse.shape)}; it must be contiguous float32 "
            "[total_q, q_heads]"
        )
    _check_index("cu_seqlens_q", cu_seqlens_q, ("sequences + 1",), q.device)
    sequences = cu_seqlens_q.shape[0] - 1
    if sequences < 0:
        raise ValueError("cu_seqlens_q is empty; it must be [sequences + 1]")
    if block_table is None:
        _check_packed(sequences, cu_seqlens_k, seqused_k, q.device)
    else:
        _check_paged(sequences, cu_seqlens_k, block_table, seqused_k, q.device)
    if max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q is {max_seqlen_q}; it must not be negative")
    if not (softmax_scale > 0 and math.isfinite(softmax_scale)):
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be positive and finite")


def check_backward(
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
    """Raises on whatever the kernels of the backward could not take."""
    rest = (cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, 1, causal, softmax_scale)
    check(q, k, v, out, lse, *rest)
    pairs = (("dout", dout, "q", q), ("dq", dq, "q", q), ("dk", dk, "k", k), ("dv", dv, "v", v))
    for name, tensor, other_name, other in pairs:
        if tensor.shape != other.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and {other_name} {tuple(other.shape)}; "
                "they must agree"
            )
        _check_layout(name, tensor, q)


def is_readable(tensor: Tensor) -> bool:
    """Whether rows are contiguous and begin on 16-byte boundaries, if the tensor does."""
    *outer, last = tensor.stride()
    return last == 1 and all(stride % _CHUNK == 0 for stride in outer)


def _check_query(q: Tensor) -> None:
    if q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}; attention runs on CUDA devices")
    if q.dtype not in ELEMENTS:
        raise TypeError(f"q is {q.dtype}; attention takes torch.bfloat16 and torch.float16")
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be [total_q, q_heads, head_dim]")
    if q.shape[2] not in HEAD_DIMS:
        raise ValueError(f"q has head_dim {q.shape[2]}; attention takes {HEAD_DIMS}")


def _check_keys(q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> None:
    if paged and k.dim() != 4:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; with block_table it must be "
            "[pages, page_size, kv_heads, head_dim]"
        )
    if not paged and k.dim() != 3:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; without block_table it must be "
            "[total_k, kv_heads, head_dim]"
        )
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)} and k {tuple(k.shape)}; they must agree")
    if k.shape[-1] != q.shape[2]:
        raise ValueError(f"k has head_dim {k.shape[-1]} and q {q.shape[2]}; they must agree")
    q_heads, kv_heads = q.shape[1], k.shape[-2]
    if kv_heads == 0 or q_heads == 0 or q_heads % kv_heads != 0:
        raise ValueError(
            f"q has {q_heads} heads and k {kv_heads}; the first must be a multiple of the second"
        )
    if paged and k.shape[1] == 0:
        raise ValueError(f"k has shape {tuple(k.shape)}; a page must hold at least one key")


def _check_layout(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.dtype != q.dtype:
        raise TypeError(f"{name} is {tensor.dtype} and q {q.dtype}; they must agree")
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; they must agree")
    strides = tensor.stride()
    if strides[-1] != 1:
        raise ValueError(f"{name} has strides {strides}; its last dimension must be contiguous")
    for size, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
        if size > 1 and stride % _CHUNK != 0:
            raise ValueError(
                f"{name} has strides {strides}; all but the last must be multiples of {_CHUNK}"
            )


def _check_packed(
    sequences: int, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None, device: torch.device
) -> None:
    if seqused_k is not None:
        raise ValueError(
            "seqused_k is given without block_table; packed keys take cu_seqlens_k instead"
        )
    if cu_seqlens_k is None:
        raise ValueError(
            "cu_seqlens_k is missing; give it for packed keys, or block_table and seqused_k for "
            "paged ones"
        )
    _check_index("cu_seqlens_k", cu_seqlens_k, ("sequences + 1",), device)
    if cu_seqlens_k.shape[0] != sequences + 1:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries and cu_seqlens_q {sequences + 1}; "
            "they must agree"
        )


def _check_paged(
    sequences: int,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor,
    seqused_k: Tensor | None,
    device: torch.device,
) -> None:
    if cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k is given with block_table; paged keys take seqused_k instead"
        )
    if seqused_k is None:
        raise ValueError("seqused_k is missing; with block_table it must be [sequences]")
    _check_index("seqused_k", seqused_k, ("sequences",), device)
    _check_index("block_table", block_table, ("sequences", "max_pages"), device)
    if seqused_k.shape[0] != sequences:
        raise ValueError(
            f"seqused_k has {seqused_k.shape[0]} entries; cu_seqlens_q says {sequences} sequences"
        )
    if block_table.shape[0] != sequences:
        raise ValueError(
            f"block_table has {block_table.shape[0]} rows; cu_seqlens_q says {sequences} sequences"
        )


def _check_index(name: str, tensor: Tensor, shape: tuple[str, ...], device: torch.device) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} is {tensor.dtype}; it must be torch.int32")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device} and q on {device}; they must agree")
    if tensor.dim() != len(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{', '.join(shape)}]")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its last dimension must be contiguous"
        )
