"""The builds of `attention_generic.cu` and what a launch of it takes; it can serve every call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlbench.kernels.attention.launch import Launch, Plan, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda.core import Device, Kernel

SOURCE = "attention/attention_generic"
HEAD_DIMS = (64, 128, 256)
ELEMENTS = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
BLOCK_KEYS = {64: 128, 128: 128, 256: 80}  # as definition.cuh has it; shared_bytes are checked
MAX_GRID = 2**31 - 1
LOG2_E = math.log2(math.e)


def split_keys(head_dim: int) -> int:
    """Keys of a split, as definition.cuh has it."""
    block = BLOCK_KEYS[head_dim]
    return (2048 + block // 2) // block * block


@dataclass(frozen=True)
class Variant:
    """One build of the source. Only `tile_rows` is a free choice: it does not change the bits."""

    source: ClassVar[str] = SOURCE

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
        return (self.tile_rows + 2 * BLOCK_KEYS[self.head_dim]) * self.head_dim * 2

    @property
    def waiting_floats(self) -> int:
        """What a block keeps in global memory between splits: O, and a maximum and sum a row."""
        return self.threads * (self.head_dim // 8 + 1) * 4

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
        for element in ELEMENTS.values():
            for paged in (False, True):
                yield Variant(head_dim, element, paged)
                if head_dim == 256:
                    yield Variant(head_dim, element, paged, tile_rows=32)


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sequences: int,
    block_table: Tensor | None,
    max_seqlen_q: int,
    splits: int,
    causal: bool,
    softmax_scale: float,
) -> Plan:
    """What a checked call with something to compute launches. The device is the current one.

    splits: no sequence has keys in more of them.
    """
    from cuda.core import LaunchConfig

    device = q.device.index
    variant, kernel = _load(q.shape[2], q.dtype, block_table is not None, device)
    tiles, blocks = tiles_of(q, k, sequences, max_seqlen_q, variant.tile_rows)
    numbers = numbers_of(q, k, v, out, block_table, tiles, causal, softmax_scale)
    config = LaunchConfig(grid=blocks, block=variant.threads, shmem_size=variant.shared_bytes)
    work = blocks * variant.waiting_floats if splits > 1 else 0
    return Plan(device, (Launch(config, kernel, numbers),), work)


def tiles_of(
    q: Tensor, k: Tensor, sequences: int, max_seqlen_q: int, tile_rows: int
) -> tuple[int, int]:
    """Tiles of the longest sequence under one KV head, and thread blocks in all.

    Raises ValueError where that is more than a grid can have.
    """
    q_heads, kv_heads = q.shape[1], k.shape[-2]
    tiles = -(-max_seqlen_q * (q_heads // kv_heads) // tile_rows)
    blocks = tiles * kv_heads * sequences
    if blocks > MAX_GRID:
        raise ValueError(
            f"max_seqlen_q {max_seqlen_q} for {sequences} sequences and {q_heads} heads needs "
            f"{blocks} thread blocks; at most {MAX_GRID} can be started"
        )
    return tiles, blocks


def numbers_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    block_table: Tensor | None,
    tiles: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[int | float, ...]:
    """The parameters after the pointers of a source whose thread blocks take tiles of rows."""
    kv_heads = k.shape[-2]
    return (
        *strides(q, k, v, out, block_table),
        kv_heads,
        q.shape[1] // kv_heads,
        tiles,
        1 if causal else 0,
        float(softmax_scale),
        softmax_scale * LOG2_E,
    )


def strides(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, block_table: Tensor | None
) -> tuple[int, ...]:
    """The parameters that every source takes right after the pointers."""
    if block_table is None:
        k_strides, v_strides = (0, *k.stride()[:2]), (0, *v.stride()[:2])
        table = (0, 1)
    else:
        k_strides, v_strides = k.stride()[:3], v.stride()[:3]
        table = (block_table.stride(0), k.shape[1])
    return (*q.stride()[:2], *k_strides, *v_strides, *out.stride()[:2], *table)


_loaded: dict[tuple[int, torch.dtype, bool, int], tuple[Variant, Kernel]] = {}


def _load(head_dim: int, dtype: torch.dtype, paged: bool, device: int) -> tuple[Variant, Kernel]:
    key = (head_dim, dtype, paged, device)
    found = _loaded.get(key)
    if found is None:
        from cuda.core import Device

        machine = Device(device)
        variant = _fitting_variant(head_dim, dtype, paged, machine)
        found = _loaded[key] = variant, load(variant, machine)
    return found


def _fitting_variant(head_dim: int, dtype: torch.dtype, paged: bool, machine: Device) -> Variant:
    major, minor = machine.compute_capability
    if major < 8:
        raise ValueError(
            f"q is on a device of compute capability {major}.{minor}; attention needs 8.0"
        )
    variant = Variant(head_dim, ELEMENTS[dtype], paged)
    # Some GPUs (8.6, 8.9, 12.0) have 99 KiB of shared memory for a block: half the rows fit.
    if variant.shared_bytes > machine.properties.max_shared_memory_per_block_optin:
        variant = Variant(head_dim, ELEMENTS[dtype], paged, tile_rows=32)
    return variant
