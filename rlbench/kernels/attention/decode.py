"""The builds of `attention_decode_sm90.cu`, and when it serves a call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention import combine
from rlbench.kernels.attention.family import Family, every
from rlbench.kernels.attention.launch import Launch, Plan, fits, kernel_of, sms
from rlbench.kernels.attention.request import BLOCK_KEYS, HEADS, split_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.request import Request

_KEY_WARPS = 8
_KEY_STAGES = 4
_COLUMNS = 16  # of a value warp; no rank has fewer
_CAPABILITIES = range(9, 12)  # which have clusters; from 12 on shared memory is too small
RANKS = (4, 2)
"""Thread blocks that may share a split, the most first. It does not change the bits."""
_SMS_OF_UNIT = 4
"""SMs for each split of each sequence under each KV head, from which on clusters are faster than
the streaming kernel (measured on an H200)."""


@dataclass(frozen=True)
class Variant(Family):
    """One build of the source. The constants are the source's; it checks shared_bytes."""

    name: ClassVar[str] = "decode"
    source: ClassVar[str] = "attention/attention_decode_sm90"

    ranks: int
    """Thread blocks of a cluster, which share a split."""

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return f"{super().kernel}_r{self.ranks}"

    @property
    def value_warps(self) -> int:
        return self.head_dim // self.ranks // _COLUMNS

    @property
    def threads(self) -> int:
        return 32 * (_KEY_WARPS + self.value_warps)

    @property
    def shared_bytes(self) -> int:
        """Rings of K and V, the scores of a split, Q, and what is said about a block."""
        key_ring = _KEY_WARPS * _KEY_STAGES * 16 * 128
        value_ring = self.value_warps * min(32, 64 // self.value_warps) * 32 * 32
        scores = split_keys(self.head_dim) * HEADS * 4
        query = HEADS * (self.head_dim * 2 + 16)
        said = (3 * self._blocks + 2) * HEADS * 4 + 8
        return key_ring + value_ring + scores + query + said

    @property
    def _blocks(self) -> int:
        return split_keys(self.head_dim) // BLOCK_KEYS[self.head_dim]

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {**super().defines, "RANKS": self.ranks}


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for, from compute capability 9.0."""
    for ranks in RANKS:
        yield from every(functools.partial(Variant, ranks=ranks))


def variant_for(request: Request) -> Variant | None:
    """The build with the most ranks that the GPU can take all clusters of at once; None if there is
    none, or the call is no decode step. The bits are the same whoever serves it."""
    if request.max_seqlen_q != 1 or request.decode_units * _SMS_OF_UNIT > sms(request.device):
        return None
    for ranks in RANKS:
        variant = Variant(*request.build, ranks)
        if fits(variant, request.device, _CAPABILITIES) and request.decode_units <= _room(
            variant, request.device
        ):
            return variant
    return None


def serves(request: Request) -> bool:
    """Whether this kernel should take the call."""
    return variant_for(request) is not None


def plan(request: Request) -> Plan:
    """What a decode step launches. The device is the current one."""
    variant = variant_for(request)
    assert variant is not None
    return plan_of(request, variant)


def plan_of(request: Request, variant: Variant) -> Plan:
    """What a decode step launches with that build."""
    from cuda.core import LaunchConfig

    config = LaunchConfig(
        grid=request.decode_units * variant.ranks,  # the source has the cluster's size
        block=variant.threads,
        shmem_size=variant.shared_bytes,
    )
    parts = Launch(config, kernel_of(variant, request.device), combine.numbers(request))
    one = request.splits == 1
    return Plan(request.device, (parts,), 0) if one else combine.after(request, parts)


@functools.cache
def _room(variant: Variant, device: int) -> int:
    """Clusters that the GPU has at a time: its SMs are not divided evenly."""
    from cuda.core import Device, LaunchConfig

    config = LaunchConfig(
        grid=1, cluster=variant.ranks, block=variant.threads, shmem_size=variant.shared_bytes
    )
    occupancy = kernel_of(variant, device).occupancy
    return int(occupancy.max_active_clusters(config, stream=Device(device).default_stream))
