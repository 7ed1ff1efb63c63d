"""The builds of `attention_decode_sm90.cu` and `attention_combine.cu`, and when they serve a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from rlbench.kernels.attention.generic import BLOCK_KEYS, ELEMENTS, LOG2_E, split_keys, strides
from rlbench.kernels.attention.launch import Launch, Plan, fits, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from cuda.core import Kernel

HEADS = 8
"""Query heads of a KV group that one cluster serves."""
_KEY_WARPS = 8
_CAPABILITIES = range(9, 12)  # which have clusters; from 12 on shared memory is too small


@dataclass(frozen=True)
class Variant:
    """One build of the decode kernel. The constants are the source's; it checks shared_bytes."""

    source: ClassVar[str] = "attention/attention_decode_sm90"

    head_dim: int
    element: str
    paged: bool

    @property
    def kernel(self) -> str:
        """The kernel's name, as a profiler shows it."""
        return f"rlbench_attention_decode_{_suffix(self)}"

    @property
    def ranks(self) -> int:
        """Thread blocks of a cluster, which share a split."""
        return 4 if self.head_dim == 64 else 8

    @property
    def value_warps(self) -> int:
        return self.head_dim // self.ranks // 16

    @property
    def threads(self) -> int:
        return 32 * (_KEY_WARPS + self.value_warps)

    @property
    def shared_bytes(self) -> int:
        """Rings of K and V, a split's weights and their sums by pairs, and what is said a block."""
        block, keys = BLOCK_KEYS[self.head_dim], split_keys(self.head_dim)
        blocks = keys // block
        rank_tiles = -(-blocks // self.ranks) * (block // 16)
        key_ring = _KEY_WARPS * (2 if self.head_dim == 64 else 3) * 16 * 128
        value_ring = self.value_warps * (5 if self.head_dim == 256 else 6) * block * 32
        weights = keys * HEADS * 2
        sums = HEADS // self.ranks * keys // 2 * 4
        return key_ring + value_ring + weights + sums + (rank_tiles + 3 * blocks + 2) * HEADS * 4

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {**_defines(self), "SHARED_BYTES": self.shared_bytes}


@dataclass(frozen=True)
class Combine:
    """One build of the kernel that merges splits."""

    source: ClassVar[str] = "attention/attention_combine"
    shared_bytes: ClassVar[int] = 0

    head_dim: int
    element: str
    paged: bool

    @property
    def kernel(self) -> str:
        """The kernel's name, as a profiler shows it."""
        return f"rlbench_attention_combine_{_suffix(self)}"

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return _defines(self)


def _suffix(build: Variant | Combine) -> str:
    layout = "paged" if build.paged else "packed"
    return f"d{build.head_dim}_{build.element.lower()}_{layout}"


def _defines(build: Variant | Combine) -> dict[str, str | int]:
    return {
        "HEAD_DIM": build.head_dim,
        "ELEMENT": build.element,
        "PAGED": int(build.paged),
        "KERNEL_NAME": build.kernel,
    }


def variants() -> Iterator[Variant | Combine]:
    """Every build that a call can ask for; the decode kernel from compute capability 9.0."""
    for head_dim in BLOCK_KEYS:
        for element in ELEMENTS.values():
            for paged in (False, True):
                yield Variant(head_dim, element, paged)
                yield Combine(head_dim, element, paged)


def serves(q: Tensor, kv_heads: int, sequences: int, max_seqlen_q: int) -> bool:
    """Whether the call is a decode step that is faster here; the bits are the same either way.

    With more (sequence, KV head) pairs than SMs the generic kernel fills the GPU by itself.
    """
    if max_seqlen_q != 1:
        return False
    from cuda.core import Device

    machine = Device(q.device.index)
    build = Variant(q.shape[2], ELEMENTS[q.dtype], paged=True)
    few = sequences * kv_heads <= machine.properties.multiprocessor_count
    return bool(few and fits(build, machine, _CAPABILITIES))


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sequences: int,
    block_table: Tensor | None,
    splits: int,
    softmax_scale: float,
) -> Plan:
    """What a decode step launches. The device is the current one.

    splits: no sequence has keys in more of them.
    """
    from cuda.core import LaunchConfig

    device = q.device.index
    _, q_heads, head_dim = q.shape
    variant, kernel, combine = _load(head_dim, q.dtype, block_table is not None, device)
    kv_heads = k.shape[-2]
    group = q_heads // kv_heads
    numbers = (
        *strides(q, k, v, out, block_table),
        kv_heads,
        group,
        sequences,
        splits,
        float(softmax_scale),
        softmax_scale * LOG2_E,
    )
    clusters = splits * sequences * kv_heads * -(-group // HEADS)
    config = LaunchConfig(
        grid=clusters * variant.ranks, block=variant.threads, shmem_size=variant.shared_bytes
    )
    parts = Launch(config, kernel, numbers)
    if splits == 1:
        return Plan(device, (parts,), 0)
    merging = Launch(
        LaunchConfig(
            grid=sequences * q_heads, block=head_dim, programmatic_stream_serialization=True
        ),
        combine,
        numbers,
    )
    return Plan(device, (parts, merging), splits * sequences * q_heads * (head_dim + 5))


_loaded: dict[tuple[int, torch.dtype, bool, int], tuple[Variant, Kernel, Kernel]] = {}


def _load(
    head_dim: int, dtype: torch.dtype, paged: bool, device: int
) -> tuple[Variant, Kernel, Kernel]:
    key = (head_dim, dtype, paged, device)
    found = _loaded.get(key)
    if found is None:
        from cuda.core import Device

        machine = Device(device)
        variant = Variant(head_dim, ELEMENTS[dtype], paged)
        combine = Combine(head_dim, ELEMENTS[dtype], paged)
        found = _loaded[key] = variant, load(variant, machine), load(combine, machine)
    return found
