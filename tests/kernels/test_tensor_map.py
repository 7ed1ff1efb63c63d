"""Which queries and keys TMA can copy, what their map says, and how the driver is told."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core to plan: pip install 'rlbench[kernels]'")

from emulation.launches import prefill_plan_on
from emulation.problems import Case, Problem, problem_of

from rlbench.kernels.attention import prefill, tensor_map
from rlbench.kernels.attention.tensor_map import (
    TensorMap,
    of_ends,
    of_keys,
    of_queries,
    of_tiles,
    page_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

K = 1  # its pointer


def keys(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")


def map_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMap:
    found = of_keys(K, keys(shape, strides))
    assert found is not None
    return found


def test_map_of_contiguous_keys() -> None:
    assert map_of((100, 2, 256), (512, 256, 1)) == TensorMap(
        pointer=K,
        shift=-100 * 1024,
        shape=(64, 100, 4, 2, 101),
        strides=(1024, 128, 512, 1024),
        box=(64, 80, 4, 1, 1),
    )


def test_map_of_tiles() -> None:
    paged = keys((9, 32, 2, 128), (8192, 256, 128, 1))
    assert of_tiles(K, paged, rows=16, columns=128) == TensorMap(
        pointer=K,
        shift=0,
        shape=(64, 32, 2, 2, 9),
        strides=(512, 128, 256, 16384),
        box=(64, 16, 2, 1, 1),
    )
    half = of_tiles(K, keys((100, 2, 256), (512, 256, 1)), rows=16, columns=32)
    assert half == TensorMap(
        pointer=K,
        shift=0,
        shape=(64, 100, 4, 2, 1),
        strides=(1024, 128, 512, 512),
        box=(32, 16, 1, 1, 1),
    )
    assert half.swizzle == 64


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((9, 24, 2, 64), (3072, 128, 64, 1)),  # a tile would be in two pages
        ((9, 16, 2, 64), (0, 128, 64, 1)),
        ((9, 16, 2, 64), (2048, 0, 64, 1)),
        ((9, 16, 2, 64), (2048, 132, 64, 1)),
        ((0, 16, 2, 64), (2048, 128, 64, 1)),
        ((0, 2, 64), (128, 64, 1)),
    ],
)
def test_no_map_of_tiles(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert of_tiles(K, keys(shape, strides), rows=16, columns=64) is None


def test_map_of_ends() -> None:
    pool = keys((9, 2, 32, 2, 128), (16384, 8192, 256, 128, 1))
    assert of_ends(K, pool[:, 1], rows=16) == TensorMap(
        pointer=K,
        shift=-16 * 512,
        shape=(64, 16, 2, 2, 8 * 64 + 33),
        strides=(512, 128, 256, 512),
        box=(64, 16, 2, 1, 1),
    )
    assert page_rows(pool[:, 1]) == 64
    packed = keys((100, 2, 256), (512, 256, 1))
    assert of_ends(K, packed, rows=80) == TensorMap(
        pointer=K,
        shift=-80 * 1024,
        shape=(64, 80, 4, 2, 101),
        strides=(1024, 128, 512, 1024),
        box=(64, 80, 4, 1, 1),
    )
    assert page_rows(packed) == 0
    one_page = keys((1, 16, 1, 64), (7, 64, 3, 1))
    assert of_ends(K, one_page, rows=16) is not None
    assert page_rows(one_page) == 0


@pytest.mark.parametrize("rows", [16, 128])
def test_a_box_ends_where_it_should(rows: int) -> None:
    pages, size, stride = 5, 256, 384  # rows from page to page
    pool = keys((pages, size, 3, 128), (stride * 3 * 128, 3 * 128, 128, 1))
    it = of_ends(K, pool, rows)
    assert it is not None
    assert page_rows(pool) == stride
    for page, first, count in ((0, 0, 1), (2, 128, rows), (4, size - rows, rows - 1)):
        row = page * stride + first
        for key in (0, count - 1):
            where = (0, rows - count + key, 1, 2, row + count)
            assert all(0 <= place < size for place, size in zip(where, it.shape, strict=True))
            got = it.shift + sum(c * s for c, s in zip(where, (2, *it.strides), strict=True))
            assert got == 2 * ((row + key) * 3 * 128 + 2 * 128 + 64)
        assert rows - count + count == it.shape[1]  # what follows the last key is outside


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((9, 24, 2, 64), (3072, 128, 64, 1)),  # a box would be in two pages
        ((9, 16, 2, 64), (2056, 128, 64, 1)),  # pages are not a number of rows apart
        ((9, 16, 2, 64), (2048, 0, 64, 1)),
        ((9, 16, 2, 64), (2112, 132, 64, 1)),
        ((0, 16, 2, 64), (2048, 128, 64, 1)),
        ((0, 2, 64), (128, 64, 1)),
        ((2**27, 16, 1, 64), (1024, 64, 64, 1)),
        ((2**31 - 1, 1, 64), (64, 64, 1)),
    ],
)
def test_no_map_of_ends(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert of_ends(K, keys(shape, strides), rows=16) is None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_box_begins_at_its_key_and_ends_with_the_sequence(head_dim: int) -> None:
    total, heads, gap = 1000, 3, 24
    strides = (heads * (head_dim + gap) + 8, head_dim + gap, 1)
    it = map_of((total, heads, head_dim), strides)
    for first, end in ((0, 1000), (0, 1), (999, 1), (300, 301)):
        for key in (0, end - 1):
            where = (0, total - end + key, 1 if head_dim > 64 else 0, 2, first + end)
            assert all(0 <= place < size for place, size in zip(where, it.shape, strict=True))
            got = it.shift + sum(c * s for c, s in zip(where, (2, *it.strides), strict=True))
            assert got == 2 * ((first + key) * strides[0] + 2 * strides[1] + where[2] * 64)
        assert total - end + end == it.shape[1]  # what follows the last key is outside


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((0, 2, 64), (128, 64, 1)),  # there is nothing
        ((10, 2, 64), (0, 64, 1)),  # expanded
        ((10, 2, 64), (128, 0, 1)),
        ((10, 2, 64), (132, 64, 1)),  # not of 16 bytes
        ((10, 2, 64), (128, 68, 1)),
        ((10, 2, 64), (2**39, 64, 1)),
        ((10, 2, 64), (64, 2**39, 1)),
        ((2**31 - 1, 2, 64), (8, 64, 1)),
    ],
)
def test_no_map(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert of_keys(K, keys(shape, strides)) is None


def test_strides_of_single_ones_do_not_matter() -> None:
    for stride in (0, 1, 2**50):
        assert map_of((1, 1, 128), (stride, stride, 1)).strides == (256, 128, 256, 256)


def test_map_of_queries() -> None:
    qkv = keys((100, 20, 128), (20 * 128, 128, 1))
    assert of_queries(0, qkv[:, :16], group=8, tile_rows=128) == TensorMap(
        pointer=0,
        shift=0,
        shape=(64, 16, 100, 2, 1),
        strides=(256, 20 * 256, 128, 256),
        box=(64, 8, 16, 2, 1),
    )
    one = of_queries(0, keys((1, 1, 64), (0, 1, 1)), group=1, tile_rows=192)
    assert one is not None
    assert (one.strides, one.box) == ((128, 128, 128, 128), (64, 1, 192, 1, 1))


@pytest.mark.parametrize(
    ("shape", "strides", "group"),
    [
        ((10, 10, 64), (640, 64, 1), 5),  # a tile would begin inside of a position
        ((10, 256, 64), (2**14, 64, 1), 256),  # or end there
        ((10, 2, 64), (0, 64, 1), 1),
        ((10, 2, 64), (128, 0, 1), 1),
        ((10, 2, 64), (132, 64, 1), 1),
        ((10, 2, 64), (2**39, 64, 1), 1),
        ((0, 2, 64), (128, 64, 1), 1),
    ],
)
def test_no_map_of_queries(shape: tuple[int, ...], strides: tuple[int, ...], group: int) -> None:
    assert of_queries(0, keys(shape, strides), group, tile_rows=128) is None


def packed(page_size: int | None = None, heads: int = 2) -> Problem:
    return problem_of(Case(64, torch.bfloat16, page_size, heads, 2, ((3, 40), (3, 40))))


def test_plan_uses_tma_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_of(problem: Problem) -> prefill.Variant:
        (one,) = prefill_plan_on(problem, sms=1).launches
        assert isinstance(one.kernel, prefill.Variant)
        pointers = [0] if one.kernel.tma_q else []
        assert [each.pointer for each in one.maps] == pointers + ([1, 2] if one.kernel.tma else [])
        return one.kernel

    problem = packed()
    assert build_of(problem) == prefill.Variant(64, "Bf16", paged=False, tma=True, tma_q=True)
    assert build_of(packed(heads=10)) == prefill.Variant(64, "Bf16", paged=False, tma=True)
    assert build_of(packed(16)) == prefill.Variant(64, "Bf16", paged=True, tma_q=True)
    assert build_of(packed(16, heads=10)) == prefill.Variant(64, "Bf16", paged=True)
    one_head = problem.request.v[:, :1].expand(-1, 2, -1)
    expanded = replace(problem, request=replace(problem.request, v=one_head))
    assert build_of(expanded) == prefill.Variant(64, "Bf16", paged=False, tma_q=True)
    monkeypatch.setenv(tensor_map.SWITCH, "0")
    assert build_of(problem) == prefill.Variant(64, "Bf16", paged=False)


@pytest.fixture
def driver_function() -> Iterator[Callable[..., int]]:
    """Takes the driver's place; its arguments are in `calls`."""

    def encode(address: int, *rest: Any) -> int:
        calls.append((address, *(list(a) if isinstance(a, ctypes.Array) else a for a in rest)))
        ctypes.memset(address, len(calls), tensor_map.BYTES)
        return 0 if rest[2] % 16 == 0 else 1

    calls: list[tuple[object, ...]] = []
    encode.calls = calls  # type: ignore[attr-defined]
    tensor_map.encoded.cache_clear()
    with mock.patch.object(tensor_map, "_driver_function", return_value=encode):
        yield encode
    tensor_map.encoded.cache_clear()


def test_a_map_is_encoded_once(driver_function: Any) -> None:
    it = map_of((100, 2, 128), (256, 128, 1))
    first, second = 0x7F0000000000, 0x7F0000010000
    got = [tensor_map.encoded(it, pointer) for pointer in (first, second, first)]
    assert got[0] is got[2]
    assert [ctypes.string_at(each.address, 128) for each in got] == [
        bytes([number]) * 128 for number in (1, 2, 1)
    ]
    address, *rest = driver_function.calls[0]
    assert address % 128 == 0
    assert rest == [
        *(1, 5, first - 100 * 512),  # 16-bit integers; the rank
        *([64, 100, 2, 2, 101], [512, 128, 256, 512], [64, 128, 2, 1, 1], [1] * 5),
        *(0, 3, 3, 0),  # not interleaved, swizzled by 128 bytes, 256 bytes at a time, zeros
    ]


@pytest.mark.usefixtures("driver_function")
def test_what_the_driver_refuses_is_an_error() -> None:
    it = map_of((100, 2, 128), (256, 128, 1))
    with pytest.raises(RuntimeError, match=r"INVALID_VALUE.* RLBENCH_ATTENTION_TMA=0"):
        tensor_map.encoded(it, 0x7F0000000008)
