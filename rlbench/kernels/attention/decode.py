"""The builds of `attention_decode_sm90.cu` and `attention_combine.cu`, and when they serve a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention.launch import Launch, Plan, fits, load
from rlbench.kernels.attention.request import BLOCK_KEYS, ELEMENTS, split_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cuda.core import Kernel

    from rlbench.kernels.attention.request import Request

HEADS = 8
"""Query heads of a KV group that one cluster serves."""
_KEY_WARPS = 8
_PAIRS_PER_SM = 1 / 3
"""(sequence, KV head) pairs from which on the generic kernel is faster: 61 at D = 256, 42 at 128 and
52 at 64 on an H200's 132 SMs, by the times of 1 and 16 sequences of 8192 keys."""
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


def serves(request: Request) -> bool:
    """Whether the call is a decode step that is faster here; the bits are the same either way.

    With many (sequence, KV head) pairs the generic kernel fills the GPU by itself.
    """
    if request.max_seqlen_q != 1:
        return False
    from cuda.core import Device

    machine = Device(request.device)
    pairs = request.sequences * request.kv_heads
    few = pairs <= _PAIRS_PER_SM * machine.properties.multiprocessor_count
    return bool(few and fits(Variant(*request.build), machine, _CAPABILITIES))


def plan(request: Request) -> Plan:
    """What a decode step launches. The device is the current one."""
    from cuda.core import LaunchConfig

    variant, kernel, combine = _load(request.build, request.device)
    sequences, splits, q_heads = request.sequences, request.splits, request.q.shape[1]
    numbers = (*request.first_numbers, sequences, splits, *request.scales)
    clusters = splits * sequences * request.kv_heads * -(-request.group // HEADS)
    config = LaunchConfig(
        grid=clusters * variant.ranks, block=variant.threads, shmem_size=variant.shared_bytes
    )
    parts = Launch(config, kernel, numbers)
    if splits == 1:
        return Plan(request.device, (parts,), 0)
    merging = Launch(
        LaunchConfig(
            grid=sequences * q_heads,
            block=variant.head_dim,
            programmatic_stream_serialization=True,
        ),
        combine,
        numbers,
    )
    work = splits * sequences * q_heads * (variant.head_dim + 5)
    return Plan(request.device, (parts, merging), work)


_loaded: dict[tuple[tuple[int, str, bool], int], tuple[Variant, Kernel, Kernel]] = {}


def _load(build: tuple[int, str, bool], device: int) -> tuple[Variant, Kernel, Kernel]:
    found = _loaded.get((build, device))
    if found is None:
        from cuda.core import Device

        machine = Device(device)
        variant = Variant(*build)
        kernels = load(variant, machine), load(Combine(*build), machine)
        found = _loaded[build, device] = variant, *kernels
    return found
