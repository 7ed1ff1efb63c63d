"""Writes safetensors where the library of that name need not be: in an engine's interpreter.

The format, https://github.com/huggingface/safetensors#format: eight bytes, little-endian, hold the
length of a JSON header; the header gives each tensor's dtype, shape and range of bytes, and strings
under `__metadata__`; the tensors follow, row-major and little-endian, without holes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlbench.measure.bits import raw
from rlbench.results import atomic

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
}
ALIGNMENT = 8
"""Bytes; the header is padded with spaces, so that readers may map the tensors."""


def write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write floating-point tensors of any shape, whole or not at all.

    Raises OSError, and ValueError for another dtype.
    """
    atomic.remove_remains(path)
    atomic.write(path, [header(tensors, metadata), *(raw(t) for t in tensors.values())])


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON header of a file with these tensors, in their order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which is not saved")
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
