"""Raw bits: which elements differ, by how many representable steps, and a digest to compare by."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers of the same width, contiguous."""
    return tensor.detach().contiguous().view(_INTEGER[tensor.element_size()])


def ordinals(tensor: torch.Tensor) -> torch.Tensor:
    """int64 numbers that count representable values: neighbours differ by 1, and -0 equals +0.

    The sign-magnitude pattern of an IEEE-754 (or bfloat16) value, folded onto a line.
    """
    width = 8 * tensor.element_size()
    bits = as_bits(tensor).to(torch.int64)
    magnitude = bits & ((1 << (width - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def raw(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy if it is on the CPU and contiguous."""
    data = as_bits(tensor).cpu()
    size = data.numel() * data.element_size()
    if size == 0:
        return memoryview(b"")
    # Without numpy, which a worker's environment may lack, ctypes is the zero-copy way to bytes.
    buffer = (ctypes.c_char * size).from_address(data.data_ptr())
    buffer.owner = data  # type: ignore[attr-defined]  # the memory stays as long as the view does
    return memoryview(buffer)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's bytes in row-major order; shape and dtype are not part of it."""
    return hashlib.sha256(raw(tensor)).hexdigest()


def joint_digest(tensors: Iterable[torch.Tensor]) -> str:
    """SHA-256 over the tensors' digests, in their order."""
    return hashlib.sha256("".join(digest(tensor) for tensor in tensors).encode()).hexdigest()


def compare(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Compare two sets of outputs bit by bit.

    Returns `equal`, `elements`, `differing`, `max_ulp` (largest distance in representable values
    among differing elements that are not NaN), `nans` (NaN elements in `actual`) and `first`: the
    first differing element in tensor order {tensor, index, expected, got}, or None. Outputs with
    other names or shapes differ in every element.
    """
    elements = differing = max_ulp = nans = 0
    first: dict[str, Any] | None = None
    for name, want in expected.items():
        got = actual.get(name)
        elements += want.numel()
        if got is None or got.shape != want.shape or got.dtype != want.dtype:
            differing += want.numel()
            shape = "nothing" if got is None else f"{list(got.shape)} {got.dtype}"
            first = first or {
                "tensor": name,
                "index": [],
                "expected": f"{list(want.shape)} {want.dtype}",
                "got": shape,
            }
            continue
        nans += int(torch.isnan(got).sum())
        unequal = as_bits(want).ne(as_bits(got.to(want.device)))
        count = int(unequal.sum())
        if count == 0:
            continue
        differing += count
        max_ulp = max(max_ulp, _max_ulp(want, got.to(want.device), unequal))
        first = first or _first(name, want, got, unequal)
    for name in actual.keys() - expected.keys():
        elements += actual[name].numel()
        differing += actual[name].numel()
    return {
        "equal": differing == 0,
        "elements": elements,
        "differing": differing,
        "max_ulp": max_ulp,
        "nans": nans,
        "first": first,
    }


def _max_ulp(want: torch.Tensor, got: torch.Tensor, unequal: torch.Tensor) -> int:
    a, b = want[unequal], got[unequal]
    numbers = ~(torch.isnan(a) | torch.isnan(b))
    if not bool(numbers.any()):
        return 0
    return int((ordinals(a[numbers]) - ordinals(b[numbers])).abs().max())


def _first(
    name: str, want: torch.Tensor, got: torch.Tensor, unequal: torch.Tensor
) -> dict[str, Any]:
    flat = int(unequal.reshape(-1).to(torch.uint8).argmax())
    index = []
    rest = flat
    for size in reversed(want.shape):
        index.append(rest % size)
        rest //= size
    return {
        "tensor": name,
        "index": index[::-1],
        "expected": show_value(want.reshape(-1)[flat]),
        "got": show_value(got.reshape(-1)[flat]),
    }


def show_value(element: torch.Tensor) -> str:
    """A scalar as its value and its bit pattern, `0.0078125 (0x3c00)`: strict JSON has no NaN."""
    width = element.element_size()
    pattern = int(as_bits(element.reshape(1))[0]) & ((1 << (8 * width)) - 1)
    return f"{element.item()!r} (0x{pattern:0{2 * width}x})"
