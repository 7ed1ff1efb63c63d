"""Tensor maps: how the tensor memory accelerator finds packed keys and values (CUtensorMap).

A sequence may end anywhere in a block of keys, and what is after it must come as zeros, which the
hardware writes for what is outside of a map's tensor. So the tensor's rows are made to end where
the copy says: with n rows in all, the map begins n rows early, and has the rows in two dimensions,
x < n and y. A box at x = n - end + key, y = first + end is at row first + key, and leaves the
tensor with key `end`. (FlashAttention-4 writes ragged outputs that way.)
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, NamedTuple

from rlbench.kernels.attention.request import BLOCK_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BYTES = 128  # of an encoded map
_ALIGNMENT = 128  # the driver asks for 64, its header for 128
_PANEL = 64  # elements of a row that lie together in shared memory: what the swizzle is for
_ELEMENT_BYTES = 2
_STRIDE_UNIT = 16
_STRIDE_LIMIT = 2**40
_COORDINATE_LIMIT = 2**31
KEPT = 4096  # encoded maps


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


class Encoded(NamedTuple):
    """What a kernel takes: BYTES at an address that is good as long as this is kept."""

    address: int
    memory: ctypes.Array[ctypes.c_char]


def of_keys(pointer: int, keys: Tensor) -> TensorMap | None:
    """The map of packed K or V [total_k, kv_heads, head_dim], or None if there can be none.

    The tensor has satisfied `checks.check`. A box is a block of keys of one head.
    """
    rows, heads, head_dim = keys.shape
    panels = head_dim // _PANEL
    row = head_dim * _ELEMENT_BYTES
    # The stride of a single one is anything, and is not used.
    row_stride = keys.stride(0) * _ELEMENT_BYTES if rows > 1 else row
    head_stride = keys.stride(1) * _ELEMENT_BYTES if heads > 1 else row
    possible = (
        0 < rows < _COORDINATE_LIMIT - 1
        and heads < _COORDINATE_LIMIT
        and all(
            0 < stride < _STRIDE_LIMIT and stride % _STRIDE_UNIT == 0
            for stride in (row_stride, head_stride)
        )
    )
    if not possible:
        return None
    return TensorMap(
        pointer,
        -rows * row_stride,
        (_PANEL, rows, panels, heads, rows + 1),
        (row_stride, _PANEL * _ELEMENT_BYTES, head_stride, row_stride),
        (_PANEL, BLOCK_KEYS[head_dim], panels, 1, 1),
    )


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
        int(driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B),
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
