"""The builds of `attention_decode_sm90.cu`, and when it serves a call."""

from __future__ import annotations

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
_CAPABILITIES = range(9, 12)  # which have clusters; from 12 on shared memory is too small


@dataclass(frozen=True)
class Variant(Family):
    """One build of the source. The constants are the source's; it checks shared_bytes."""

    name: ClassVar[str] = "decode"
    source: ClassVar[str] = "attention/attention_decode_sm90"

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
        value_ring = self.value_warps * (4 if self.head_dim == 256 else 5) * block * 32
        weights = keys * HEADS * 2
        sums = HEADS // self.ranks * keys // 2 * 4
        return key_ring + value_ring + weights + sums + (rank_tiles + 3 * blocks + 2) * HEADS * 4


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for, from compute capability 9.0."""
    return every(Variant)


def serves(request: Request) -> bool:
    """Whether the call is a decode step whose splits the GPU can take all at once, shared by
    clusters; the bits are the same whoever serves it."""
    if request.max_seqlen_q != 1:
        return False
    variant = Variant(*request.build)
    # Two blocks an SM; clusters do not fill every GPU to the last SM, an H200 to 120 of 132.
    room = 2 * sms(request.device) * 10 // 11 // variant.ranks
    return request.decode_units <= room and fits(variant, request.device, _CAPABILITIES)


def plan(request: Request) -> Plan:
    """What a decode step launches. The device is the current one."""
    from cuda.core import LaunchConfig

    variant = Variant(*request.build)
    config = LaunchConfig(
        grid=request.decode_units * variant.ranks,
        block=variant.threads,
        shmem_size=variant.shared_bytes,
    )
    parts = Launch(config, kernel_of(variant, request.device), combine.numbers(request))
    one = request.splits == 1
    return Plan(request.device, (parts,), 0) if one else combine.after(request, parts)
