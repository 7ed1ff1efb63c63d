"""Tensor maps: how the tensor memory accelerator finds queries, keys and values (CUtensorMap).

`of_queries` and `of_keys` are for the prefill, `of_tiles` and `of_ends` for decode steps, `of_rows` for the backward. A box comes to shared memory
with the swizzle of its rows' bytes: 128, 64 or 32.

For the prefill, a sequence may end anywhere in a block of keys, and what is after it must come as
zeros, which the hardware writes for what is outside of a map's tensor. So the tensor's rows are
made to end where the copy says: with n rows in all, the map begins n rows early, and has the rows
in two dimensions, x < n and y. A box at x = n - end + key, y = first + end is at row first + key,
and leaves the tensor with key `end`. (FlashAttention-4 writes ragged outputs that way.) `of_ends` does
so for boxes that end early one by one.

What is before the tensor is never read, as long as some part of a box is in the map's dimensions. For
a box wholly outside of them an H200 reads at the map's base address, which may be mapped to nothing:
kernels must not ask for one (`tma.cuh`).
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, NamedTuple

from rlbench.kernels.attention.request import BLOCK_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SWITCH = "RLBENCH_ATTENTION_TMA"
"""Environment variable: 0 has everything copied by cp.async, with the same bits."""
Q, K, V = 0, 1, 2  # among a launch's pointers
DOUT = 5  # among a backward's
BYTES = 128  # of an encoded map
_ALIGNMENT = 128  # the driver asks for 64, its header for 128
_PANEL = 64  # elements of a row that lie together in shared memory: what the swizzle is for
_ELEMENT_BYTES = 2
_STRIDE_UNIT = 16
_STRIDE_LIMIT = 2**40
_COORDINATE_LIMIT = 2**31
KEPT = 4096  # encoded maps


def are_on() -> bool:
    """Whether TMA may copy."""
    return os.environ.get(SWITCH, "1") != "0"


def usable(*maps: TensorMap | None) -> tuple[TensorMap, ...]:
    """What a launch takes of these maps: nothing where one of them could not be made, or TMA is
    off."""
    made = tuple(each for each in maps if each is not None)
    return made if are_on() and len(made) == len(maps) else ()


class TensorMap(NamedTuple):
    """A map of 16-bit elements, but for its address. Dimensions: the fastest first."""

    pointer: int
    """Which of a launch's pointers the tensor begins at."""
    shift: int
    """Bytes from there to where the map begins."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of all dimensions but the first."""
    box: tuple[int, ...]

    @property
    def swizzle(self) -> int:
        """Bytes in which chunks of a box's rows are permuted."""
        return self.box[0] * _ELEMENT_BYTES


class Encoded(NamedTuple):
    """What a kernel takes: BYTES at an address that is good as long as this is kept."""

    address: int
    memory: ctypes.Array[ctypes.c_char]


def of_keys(
    pointer: int, keys: Tensor, parts: int = 1, block: int | None = None
) -> TensorMap | None:
    """The map of packed K or V [total_k, kv_heads, head_dim], or None if there can be none.

    The tensor has satisfied `checks.check`. A box is a block of keys of one head, as many as the
    definition's blocks have unless it says, or a part of its panels, of which there are so many.
    """
    rows, heads, head_dim = keys.shape
    panels = head_dim // _PANEL
    row_stride, head_stride = _strides(keys)
    possible = (
        0 < rows < _COORDINATE_LIMIT - 1
        and heads < _COORDINATE_LIMIT
        and _is_stride(row_stride)
        and _is_stride(head_stride)
        and panels % parts == 0
    )
    if not possible:
        return None
    return TensorMap(
        pointer,
        -rows * row_stride,
        (_PANEL, rows, panels, heads, rows + 1),
        (row_stride, _PANEL * _ELEMENT_BYTES, head_stride, row_stride),
        (_PANEL, block or BLOCK_KEYS[head_dim], panels // parts, 1, 1),
    )


def of_queries(pointer: int, q: Tensor, group: int, tile_rows: int) -> TensorMap | None:
    """The map of q [total_q, heads, head_dim], or None if there can be none.

    The tensor has satisfied `checks.check`. A box is a tile of (position, head in group) pairs, which
    has to be whole positions. The dimensions are the elements of a panel, heads, positions, panels,
    and one that is there because boxes have five.
    """
    rows, heads, head_dim = q.shape
    panels = head_dim // _PANEL
    row_stride, head_stride = _strides(q)
    possible = (
        tile_rows % group == 0
        and 0 < rows < _COORDINATE_LIMIT
        and heads < _COORDINATE_LIMIT
        and _is_stride(row_stride)
        and _is_stride(head_stride)
    )
    if not possible:
        return None
    return TensorMap(
        pointer,
        0,
        (_PANEL, heads, rows, panels, 1),
        (head_stride, row_stride, _PANEL * _ELEMENT_BYTES, head_dim * _ELEMENT_BYTES),
        (_PANEL, group, tile_rows // group, panels, 1),
    )


def of_rows(
    pointer: int, tensor: Tensor, group: int, tile_rows: int, parts: int = 1
) -> TensorMap | None:
    """The map of q, or what is shaped like it, [total_q, heads, head_dim], whose boxes end where their
    sequence does, or None if there can be none.

    The tensor has satisfied `checks.check`. A box is a tile of (position, head in group) pairs, which
    has to be whole positions, and zeros behind the end, or a part of its panels, of which there are so
    many. The dimensions are the elements of a panel,
    heads, x < total_q, panels, and y. A box of the positions from p on of a sequence with n, which
    begins at a row, is at x = total_q - n + p, y = row + n.
    """
    rows, heads, head_dim = tensor.shape
    row_stride, head_stride = _strides(tensor)
    panels = head_dim // _PANEL
    possible = (
        tile_rows % group == 0
        and panels % parts == 0
        and 0 < rows < _COORDINATE_LIMIT - 1
        and heads < _COORDINATE_LIMIT
        and _is_stride(row_stride)
        and _is_stride(head_stride)
    )
    if not possible:
        return None
    return TensorMap(
        pointer,
        -rows * row_stride,
        (_PANEL, heads, rows, panels, rows + 1),
        (head_stride, row_stride, _PANEL * _ELEMENT_BYTES, row_stride),
        (_PANEL, group, tile_rows // group, panels // parts, 1),
    )


def of_tiles(pointer: int, keys: Tensor, rows: int, columns: int) -> TensorMap | None:
    """The map of packed or paged K or V, or None if there can be none.

    keys: [total_k, kv_heads, head_dim] or [pages, page_size, kv_heads, head_dim], as `checks.check`
    has found them. Packed keys are one page. The dimensions are the elements of a panel, keys of a
    page, panels, KV heads, pages. A box is `rows` keys of one page x `columns` elements of one
    head, which begin at a multiple of `columns`.
    """
    pages, page_size, heads, head_dim = keys.shape if keys.dim() == 4 else (1, *keys.shape)
    row_stride, head_stride = _strides(keys)
    page_stride = (keys.stride(0) if pages > 1 else head_dim) * _ELEMENT_BYTES
    paged = keys.dim() == 4
    possible = (
        0 < page_size < _COORDINATE_LIMIT
        and not (paged and page_size % rows)
        and 0 < pages < _COORDINATE_LIMIT
        and all(map(_is_stride, (row_stride, head_stride, page_stride)))
    )
    if not possible:
        return None
    panel = min(_PANEL, columns)
    return TensorMap(
        pointer,
        0,
        (_PANEL, page_size, head_dim // _PANEL, heads, pages),
        (row_stride, _PANEL * _ELEMENT_BYTES, head_stride, page_stride),
        (panel, rows, columns // panel, 1, 1),
    )


def of_ends(pointer: int, keys: Tensor, rows: int) -> TensorMap | None:
    """The map of packed or paged K or V, or None if there can be none.

    keys: as `of_tiles` takes them; pages must be a number of rows apart (`page_rows`). A box is up to
    `rows` keys of one page and head, and zeros after them. The dimensions are the elements of a
    panel, x < `rows`, panels, KV heads, and y. A box of the first n of the keys that begin at a row
    is at x = `rows` - n, y = row + n.
    """
    pages, page_size, heads, head_dim = keys.shape if keys.dim() == 4 else (1, *keys.shape)
    row_stride, head_stride = _strides(keys)
    page_stride = keys.stride(0) * _ELEMENT_BYTES if pages > 1 else 0
    paged = keys.dim() == 4
    possible = (
        pages > 0
        and page_size > 0
        and not (paged and page_size % rows)
        and _is_stride(row_stride)
        and _is_stride(head_stride)
        and page_stride % row_stride == 0
    )
    if not possible:
        return None
    end = (pages - 1) * (page_stride // row_stride) + page_size
    if end >= _COORDINATE_LIMIT - 1:
        return None
    panels = head_dim // _PANEL
    return TensorMap(
        pointer,
        -rows * row_stride,
        (_PANEL, rows, panels, heads, end + 1),
        (row_stride, _PANEL * _ELEMENT_BYTES, head_stride, row_stride),
        (_PANEL, rows, panels, 1, 1),
    )


def page_rows(keys: Tensor) -> int:
    """Rows from one page to the next, where `of_ends` has a map; 0 for packed keys."""
    one_page = keys.dim() == 3 or keys.shape[0] == 1
    return 0 if one_page else keys.stride(0) // keys.stride(1)


def _strides(tensor: Tensor) -> tuple[int, int]:
    """Bytes between the rows of [.., rows, heads, head_dim], and between its heads.

    The stride of a single one is anything, and is not used: a row's bytes stand in for it.
    """
    rows, heads, head_dim = tensor.shape[-3:]
    row_stride = tensor.stride(-3) if rows > 1 else head_dim
    head_stride = tensor.stride(-2) if heads > 1 else head_dim
    return row_stride * _ELEMENT_BYTES, head_stride * _ELEMENT_BYTES


def _is_stride(size: int) -> bool:
    """Whether a map can have a stride of so many bytes."""
    return 0 < size < _STRIDE_LIMIT and size % _STRIDE_UNIT == 0


@functools.lru_cache(KEPT)
def encoded(tensor_map: TensorMap, pointer: int) -> Encoded:
    """The map of the tensor at that address.

    Raises RuntimeError where the driver does not accept it.
    """
    from cuda.bindings import driver

    memory = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
    start = ctypes.addressof(memory)
    address = start + -start % _ALIGNMENT
    rank = len(tensor_map.shape)
    status = _driver_function()(
        address,
        # 16 bits that stay as they are, whatever they mean.
        int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16),
        rank,
        (pointer + tensor_map.shift) % 2**64,
        (ctypes.c_uint64 * rank)(*tensor_map.shape),
        (ctypes.c_uint64 * (rank - 1))(*tensor_map.strides),
        (ctypes.c_uint32 * rank)(*tensor_map.box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),  # every element
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{tensor_map.swizzle}B")),
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),  # zeros
    )
    if status != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled returns {driver.CUresult(status)!r} for {tensor_map} at "
            f"{pointer:#x}; RLBENCH_ATTENTION_TMA=0 does without"
        )
    return Encoded(address, memory)


@functools.cache
def _driver_function() -> Callable[..., int]:
    """Not the one of cuda.bindings, which encodes into a Python object, aligned to 16 bytes only."""
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    numbers = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        numbers[0],
        numbers[0],
        numbers[1],
        numbers[1],
        *(ctypes.c_int,) * 4,
    )
    function.restype = ctypes.c_int
    return function
