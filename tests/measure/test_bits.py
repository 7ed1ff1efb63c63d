"""Bits: what counts as different, where it is first, how far apart it is, and the digest."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbench.measure import bits

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def from_pattern(pattern: int, dtype: torch.dtype) -> torch.Tensor:
    """A one-element tensor with exactly these bits."""
    width = 8 * torch.empty(0, dtype=dtype).element_size()
    signed = pattern - (1 << width) if pattern >> (width - 1) else pattern
    return torch.tensor([signed], dtype=SIGNED[width // 8]).view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes in row-major order, one by one, without rlbench."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_outputs_have_no_difference(dtype: torch.dtype) -> None:
    a = torch.linspace(-3, 3, 24, dtype=torch.float64).to(dtype).view(2, 3, 4)
    assert bits.compare({"out": a}, {"out": a.clone()}) == {
        "equal": True,
        "elements": 24,
        "differing": 0,
        "max_ulp": 0,
        "nans": 0,
        "first": None,
    }


@pytest.mark.parametrize("dtype", FLOATS)
def test_first_difference_has_its_index_in_every_dimension(dtype: torch.dtype) -> None:
    a = torch.ones(4, 3, 5, dtype=dtype)
    b = a.clone()
    b[2, 1, 3] = 2
    b[3, 2, 4] = 4
    found = bits.compare({"out": a}, {"out": b})
    assert (found["equal"], found["differing"], found["elements"]) == (False, 2, 60)
    assert found["first"]["tensor"] == "out"
    assert found["first"]["index"] == [2, 1, 3]
    assert found["first"]["expected"].startswith("1.0 (0x")
    assert found["first"]["got"].startswith("2.0 (0x")


@pytest.mark.parametrize("where", [0, -1])
def test_first_difference_at_either_end_is_found(where: int) -> None:
    a = torch.zeros(7, 9, dtype=torch.bfloat16)
    b = a.clone()
    b.view(-1)[where] = 1
    assert bits.compare({"x": a}, {"x": b})["first"]["index"] == ([0, 0] if where == 0 else [6, 8])


def test_first_difference_of_a_scalar_has_an_empty_index() -> None:
    found = bits.compare({"x": torch.tensor(1.0)}, {"x": torch.tensor(2.0)})
    assert found["first"] == {
        "tensor": "x",
        "index": [],
        "expected": "1.0 (0x3f800000)",
        "got": "2.0 (0x40000000)",
    }


def test_first_difference_is_in_tensor_order() -> None:
    one = torch.zeros(2)
    found = bits.compare({"b": one, "a": one}, {"a": one + 1, "b": one + 2})
    assert found["first"]["tensor"] == "b"
    assert found["differing"] == 4


@pytest.mark.parametrize(
    ("dtype", "a", "b", "ulp"),
    [
        (torch.bfloat16, 0x3F80, 0x3F81, 1),  # 1 and its successor
        (torch.bfloat16, 0x0001, 0x8001, 2),  # the smallest numbers on either side of zero
        (torch.bfloat16, 0x0001, 0x8000, 1),
        (torch.float16, 0x3C00, 0xBC00, 2 * 0x3C00),  # 1 and -1
        (torch.float16, 0x7BFF, 0x7C00, 1),  # the largest number and infinity
        (torch.float32, 0x3F800000, 0x3F7FFFFF, 1),
        (torch.float32, 0x7F7FFFFF, 0xFF7FFFFF, 2 * 0x7F7FFFFF),
        (torch.float64, 0x3FF0000000000000, 0x3FF0000000000003, 3),
    ],
)
def test_ulp_counts_representable_values_across_zero(
    dtype: torch.dtype, a: int, b: int, ulp: int
) -> None:
    want, got = from_pattern(a, dtype), from_pattern(b, dtype)
    assert bits.compare({"x": want}, {"x": got})["max_ulp"] == ulp
    assert bits.compare({"x": got}, {"x": want})["max_ulp"] == ulp


@pytest.mark.parametrize("dtype", FLOATS)
def test_negative_zero_has_other_bits_at_no_distance(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, dtype=dtype)
    found = bits.compare({"x": zero}, {"x": -zero})
    assert (found["equal"], found["differing"], found["max_ulp"]) == (False, 3, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_of_the_same_bits_is_equal_and_still_reported(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, math.nan], dtype=dtype)
    found = bits.compare({"x": a}, {"x": a.clone()})
    assert found["equal"]
    assert found["nans"] == 1


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.bfloat16, 0x7FC0, 0x7FC1),
        (torch.float16, 0x7E00, 0xFE00),
        (torch.float32, 0x7FC00000, 0x7FC00001),
    ],
)
def test_nans_of_other_payloads_differ(dtype: torch.dtype, one: int, other: int) -> None:
    found = bits.compare({"x": from_pattern(one, dtype)}, {"x": from_pattern(other, dtype)})
    assert (found["equal"], found["differing"], found["max_ulp"], found["nans"]) == (False, 1, 0, 1)
    assert found["first"]["got"] == f"nan (0x{other:0{2 * from_pattern(0, dtype).element_size()}x})"


def test_nan_against_a_number_differs_without_hiding_the_other_distances() -> None:
    a = torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16)
    b = torch.tensor([math.nan, 1.0078125, 1.0], dtype=torch.bfloat16)
    found = bits.compare({"x": a}, {"x": b})
    assert (found["differing"], found["max_ulp"], found["nans"]) == (2, 1, 1)
    assert bits.compare({"x": b}, {"x": a})["nans"] == 0


@pytest.mark.parametrize(
    ("got", "said"),
    [
        (torch.zeros(2, 3), "[2, 3] torch.float32"),
        (torch.zeros(3, 2, dtype=torch.float64), "[3, 2] torch.float64"),
    ],
)
def test_other_shape_or_dtype_differs_in_every_element(got: torch.Tensor, said: str) -> None:
    found = bits.compare({"x": torch.zeros(3, 2)}, {"x": got})
    assert (found["equal"], found["elements"], found["differing"]) == (False, 6, 6)
    assert found["first"] == {
        "tensor": "x",
        "index": [],
        "expected": "[3, 2] torch.float32",
        "got": said,
    }


def test_missing_and_surplus_tensors_differ() -> None:
    missing = bits.compare({"x": torch.zeros(4)}, {})
    assert (missing["equal"], missing["differing"]) == (False, 4)
    assert missing["first"]["got"] == "nothing"
    surplus = bits.compare({}, {"x": torch.zeros(5)})
    assert (surplus["equal"], surplus["elements"], surplus["differing"]) == (False, 5, 5)


def test_empty_tensors_are_equal() -> None:
    assert bits.compare({"x": torch.zeros(0, 4)}, {"x": torch.zeros(0, 4)})["equal"]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8])
def test_digest_is_sha256_of_the_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(60).to(dtype).view(3, 4, 5)
    assert bits.digest(tensor) == hashlib.sha256(raw(tensor)).hexdigest()


def test_digest_of_nothing_is_that_of_no_bytes() -> None:
    assert bits.digest(torch.zeros(0, 3)) == hashlib.sha256(b"").hexdigest()


def test_digest_reads_in_row_major_order_whatever_the_strides() -> None:
    tensor = torch.arange(12, dtype=torch.float32).view(3, 4)
    turned = tensor.t()
    assert not turned.is_contiguous()
    assert bits.digest(turned) == hashlib.sha256(raw(turned)).hexdigest() != bits.digest(tensor)
    every_other = tensor[:, ::2]
    assert bits.digest(every_other) == hashlib.sha256(raw(every_other)).hexdigest()
    assert bits.digest(tensor[1:]) == hashlib.sha256(raw(tensor)[16:]).hexdigest()


def test_comparison_takes_tensors_of_any_strides_and_with_gradients() -> None:
    a = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert bits.compare({"x": a.t()}, {"x": a.t().contiguous().requires_grad_()})["equal"]
    b = a.t().clone()
    b[3, 1] = -1
    assert bits.compare({"x": a.t()}, {"x": b})["first"]["index"] == [3, 1]


def test_shown_value_has_its_bits_in_full_width() -> None:
    assert bits.show_value(torch.tensor(0.0078125, dtype=torch.bfloat16)) == "0.0078125 (0x3c00)"
    assert bits.show_value(torch.tensor(-0.0, dtype=torch.float16)) == "-0.0 (0x8000)"
    assert bits.show_value(torch.tensor(0.0)) == "0.0 (0x00000000)"


@given(st.integers(0, 0xFFFF), st.sampled_from([torch.bfloat16, torch.float16]))
def test_neighbours_on_the_number_line_have_neighbouring_ordinals(
    pattern: int, dtype: torch.dtype
) -> None:
    value = from_pattern(pattern, dtype)
    if not bool(torch.isfinite(value)):
        return
    above = torch.nextafter(value.float(), torch.tensor(math.inf)).to(dtype)
    ordinal = int(bits.ordinals(value))
    if float(value) == 0:
        assert ordinal == 0
    magnitude = pattern & 0x7FFF
    assert ordinal == (-magnitude if pattern >> 15 else magnitude)
    assert int(bits.ordinals(above)) >= ordinal
