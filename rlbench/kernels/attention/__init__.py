"""Attention forward whose bits depend on a row's own data and position alone.

`docs/kernels/attention.md` has the promise; the head of `attention_generic.cu` has the definition
of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor

from rlbench.kernels import jit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cuda.core import Kernel, LaunchConfig, Stream

__all__ = ["HEAD_DIMS", "SOURCE", "Variant", "attention", "variants"]

SOURCE = "attention/attention_generic"
HEAD_DIMS = (64, 128, 256)
_BLOCK_KEYS = {64: 128, 128: 128, 256: 80}  # as the source defines; it checks shared_bytes
_ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
_CHUNK = 8  # elements in a 16-byte access
_MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class Variant:
    """One build of the source. Only `tile_rows` is a free choice: it does not change the bits."""

    head_dim: int
    element: str
    paged: bool
    tile_rows: int = 64

    @property
    def kernel(self) -> str:
        """The kernel's name, as a profiler shows it."""
        layout = "paged" if self.paged else "packed"
        return (
            f"rlbench_attention_generic_d{self.head_dim}_{self.element.lower()}_{layout}"
            f"_m{self.tile_rows}"
        )

    @property
    def threads(self) -> int:
        """Threads of a block: one warp for 16 rows."""
        return self.tile_rows * 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its rows of Q, one block of K, one of V."""
        return (self.tile_rows + 2 * _BLOCK_KEYS[self.head_dim]) * self.head_dim * 2

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {
            "HEAD_DIM": self.head_dim,
            "ELEMENT": self.element,
            "PAGED": int(self.paged),
            "TILE_ROWS": self.tile_rows,
            "SHARED_BYTES": self.shared_bytes,
            "KERNEL_NAME": self.kernel,
        }


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for."""
    for head_dim in HEAD_DIMS:
        for element in _ELEMENTS.values():
            for paged in (False, True):
                yield Variant(head_dim, element, paged)
                if head_dim == 256:
                    yield Variant(head_dim, element, paged, tile_rows=32)


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
    device, because the first one compiles. There is no backward yet.

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
        max_seqlen_k: taken for the sake of callers that have it; nothing depends on it.
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
        NotImplementedError: a gradient would be needed.
        KernelBuildError: the kernel cannot be compiled or loaded (see `rlbench.kernels.jit`).
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "attention has no backward yet: call it under torch.no_grad(), or detach q, k and v"
        )
    if not isinstance(max_seqlen_q, (int, torch.SymInt)):
        raise TypeError(
            f"max_seqlen_q is a {type(max_seqlen_q).__name__}; it must be an int: reading it from "
            "a tensor would wait for the GPU"
        )
    if softmax_scale is None:
        softmax_scale = float(q.shape[-1]) ** -0.5
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None
    _operator(
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
        causal,
        softmax_scale,
    )
    return out if lse is None else (out, lse)


def _check(
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
    """Raises on whatever the kernel could not take; needs no data, so fake tensors do."""
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


def _check_query(q: Tensor) -> None:
    if q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}; attention runs on CUDA devices")
    if q.dtype not in _ELEMENTS:
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


class _Loaded(NamedTuple):
    """One variant on one device."""

    variant: Variant
    kernel: Kernel


class _Plan(NamedTuple):
    """A checked call without its pointers; kernel is None where there is nothing to compute."""

    device: int
    kernel: Kernel | None
    config: LaunchConfig | None
    launch: Callable[..., None] | None
    numbers: tuple[int | float, ...]


_loaded: dict[tuple[int, torch.dtype, bool, int], _Loaded] = {}
_plans: dict[tuple[object, ...], _Plan] = {}
_streams: dict[int, Stream] = {}
_KEPT = 4096  # of plans and streams; more are forgotten all at once
_LOG2_E = math.log2(math.e)


def _load(head_dim: int, dtype: torch.dtype, paged: bool, device: int) -> _Loaded:
    key = (head_dim, dtype, paged, device)
    found = _loaded.get(key)
    if found is not None:
        return found
    from cuda.bindings import driver
    from cuda.core import Device

    machine = Device(device)
    machine.set_current()  # the primary context, which is torch's
    major, minor = machine.compute_capability
    if major < 8:
        raise ValueError(
            f"q is on a device of compute capability {major}.{minor}; attention needs 8.0"
        )
    # Some GPUs (8.6, 8.9, 12.0) have 99 KiB of shared memory for a block: half the rows fit.
    variant = Variant(head_dim, _ELEMENTS[dtype], paged)
    if variant.shared_bytes > machine.properties.max_shared_memory_per_block_optin:
        variant = Variant(head_dim, _ELEMENTS[dtype], paged, tile_rows=32)
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    kernel = jit.load(SOURCE, arch=arch, defines=variant.defines, kernel=variant.kernel)
    (status,) = driver.cuKernelSetAttribute(
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        variant.shared_bytes,
        kernel.handle,
        device,
    )
    if int(status) != 0:
        raise jit.KernelBuildError(
            f"kernel {variant.kernel} for {arch}: cannot reserve {variant.shared_bytes} bytes of "
            f"shared memory: {status}"
        )
    found = _loaded[key] = _Loaded(variant, kernel)
    return found


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
) -> _Plan:
    """What a call whose arguments were found good will launch. The device is the current one."""
    device = q.device.index
    total_q, q_heads, head_dim = q.shape
    if total_q == 0 or sequences == 0 or max_seqlen_q == 0:
        return _Plan(device, None, None, None, ())
    from cuda.core import LaunchConfig, launch

    variant, kernel = _load(head_dim, q.dtype, block_table is not None, device)
    kv_heads = k.shape[-2]
    group = q_heads // kv_heads
    tiles = -(-max_seqlen_q * group // variant.tile_rows)
    blocks = tiles * kv_heads * sequences
    if blocks > _MAX_GRID:
        raise ValueError(
            f"max_seqlen_q {max_seqlen_q} for {sequences} sequences and {q_heads} heads needs "
            f"{blocks} thread blocks; at most {_MAX_GRID} can be started"
        )
    if block_table is None:
        k_strides, v_strides = (0, *k.stride()[:2]), (0, *v.stride()[:2])
        table_stride, page_size = 0, 1
    else:
        k_strides, v_strides = k.stride()[:3], v.stride()[:3]
        table_stride, page_size = block_table.stride(0), k.shape[1]
    numbers = (
        *q.stride()[:2],
        *k_strides,
        *v_strides,
        *out.stride()[:2],
        table_stride,
        page_size,
        kv_heads,
        group,
        tiles,
        1 if causal else 0,
        float(softmax_scale),
        softmax_scale * _LOG2_E,
    )
    config = LaunchConfig(grid=blocks, block=variant.threads, shmem_size=variant.shared_bytes)
    return _Plan(device, kernel, config, launch, numbers)


def _signature(tensor: Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _stream(handle: int) -> Stream:
    found = _streams.get(handle)
    if found is None:
        from cuda.core import LEGACY_DEFAULT_STREAM, Stream

        if len(_streams) >= _KEPT:
            _streams.clear()
        # Torch's default stream has the handle 0, which is the legacy one.
        found = LEGACY_DEFAULT_STREAM if handle == 0 else Stream.from_handle(handle)
        _streams[handle] = found
    return found


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
        _check(*tensors, *rest)
        with torch.cuda.device(q.device):
            plan = _plan(q, k, v, out, cu_seqlens_q.shape[0] - 1, block_table, *rest)
        if len(_plans) >= _KEPT:
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
    stream = _stream(torch.cuda.current_stream(device).cuda_stream)
    if device == torch.cuda.current_device():
        launch(stream, config, kernel, *arguments)
    else:
        with torch.cuda.device(device):
            launch(stream, config, kernel, *arguments)


_NAME = "rlbench::attention_forward"
torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, Tensor cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? block_table, Tensor? seqused_k, SymInt max_seqlen_q, "
    "bool causal, float softmax_scale) -> ()",
)
torch.library.impl(_NAME, "default", _forward)
torch.library.register_fake(_NAME, _check)
_operator = torch.ops.rlbench.attention_forward.default
