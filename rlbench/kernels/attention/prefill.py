"""The builds of `attention_prefill_sm90.cu`, and when it serves a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from rlbench.kernels.attention.generic import BLOCK_KEYS, ELEMENTS, numbers_of, tiles_of
from rlbench.kernels.attention.launch import Launch, Plan, fits, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from cuda.core import Kernel

TILE_ROWS = 128
"""Rows of a thread block, 64 for each of two consumer warpgroups."""
_CONSUMER_THREADS = 256
_STAGES = 2  # of K and of V
_CAPABILITIES = range(9, 10)  # wgmma


@dataclass(frozen=True)
class Variant:
    """One build of the source, which checks shared_bytes."""

    source: ClassVar[str] = "attention/attention_prefill_sm90"
    threads: ClassVar[int] = 128 + _CONSUMER_THREADS

    head_dim: int
    element: str
    paged: bool

    @property
    def kernel(self) -> str:
        """The kernel's name, as a profiler shows it."""
        layout = "paged" if self.paged else "packed"
        return f"rlbench_attention_prefill_d{self.head_dim}_{self.element.lower()}_{layout}"

    @property
    def shared_bytes(self) -> int:
        """Q, the stages of K and V, their barriers, and room to align them to 1024 bytes."""
        rows = TILE_ROWS + 2 * _STAGES * BLOCK_KEYS[self.head_dim]
        return rows * self.head_dim * 2 + 4 * _STAGES * 8 + 1024

    @property
    def waiting_floats(self) -> int:
        """What a block keeps in global memory between splits: O, and a maximum and sum a row."""
        return _CONSUMER_THREADS * (self.head_dim // 8 + 1) * 4

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {
            "HEAD_DIM": self.head_dim,
            "ELEMENT": self.element,
            "PAGED": int(self.paged),
            "SHARED_BYTES": self.shared_bytes,
            "KERNEL_NAME": self.kernel,
        }


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for; for sm_90a alone."""
    for head_dim in BLOCK_KEYS:
        for element in ELEMENTS.values():
            for paged in (False, True):
                yield Variant(head_dim, element, paged)


def serves(q: Tensor) -> bool:
    """Whether this kernel can take the call; the generic kernel's bits are the same."""
    from cuda.core import Device

    build = Variant(q.shape[2], ELEMENTS[q.dtype], paged=True)
    return fits(build, Device(q.device.index), _CAPABILITIES)


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
    tiles, blocks = tiles_of(q, k, sequences, max_seqlen_q, TILE_ROWS)
    numbers = numbers_of(q, k, v, out, block_table, tiles, causal, softmax_scale)
    config = LaunchConfig(grid=blocks, block=variant.threads, shmem_size=variant.shared_bytes)
    work = blocks * variant.waiting_floats if splits > 1 else 0
    return Plan(device, (Launch(config, kernel, numbers),), work)


_loaded: dict[tuple[int, torch.dtype, bool, int], tuple[Variant, Kernel]] = {}


def _load(head_dim: int, dtype: torch.dtype, paged: bool, device: int) -> tuple[Variant, Kernel]:
    key = (head_dim, dtype, paged, device)
    found = _loaded.get(key)
    if found is None:
        from cuda.core import Device

        variant = Variant(head_dim, ELEMENTS[dtype], paged)
        found = _loaded[key] = variant, load(variant, Device(device))
    return found
