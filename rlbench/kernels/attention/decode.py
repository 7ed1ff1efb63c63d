"""The builds of `attention_decode_sm90.cu`, and when it serves a call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention import combine, divisors, tensor_map
from rlbench.kernels.attention.family import Family, every
from rlbench.kernels.attention.launch import Launch, Plan, clusters_at_once, fits, kernel_of, sms
from rlbench.kernels.attention.request import BLOCK_KEYS, HEADS, split_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.request import Request
    from rlbench.kernels.attention.tensor_map import TensorMap

_TILE_KEYS = 16
_KEY_WARPS = 8
_KEY_RING = 8192  # bytes of a key warp
_VALUE_RING = {8: 81920, 4: 81920, 2: 65536}  # bytes at most, by ranks
_MAX_PITCH = 10  # floats from one tile's largest scores to the next one's
_COLUMNS = 16  # of a value warp; no rank has fewer
_CAPABILITIES = range(9, 12)  # which have clusters; from 12 on shared memory is too small
RANKS = (8, 4, 2)
"""Thread blocks that may share a split, the most first. It does not change the bits."""
_SMS_OF_UNIT = 4
"""SMs for each split of each sequence under each KV head, from which on clusters are faster than
the streaming kernel (on an H200 32 units take 23.4 us rather than 28.9, but 120 take 59, not 49)."""


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
        return self.columns // _COLUMNS

    @property
    def columns(self) -> int:
        """Of the output, for one rank."""
        return self.head_dim // self.ranks

    @property
    def unit_dims(self) -> int:
        """Dims of K that come at a time."""
        return min(128, self.head_dim)

    @property
    def threads(self) -> int:
        return 32 * (self.value_warps + _KEY_WARPS + 3)

    @property
    def shared_bytes(self) -> int:
        """Rings of K and V, the weights of a split, this rank's scores, the largest of every tile, Q,
        what is said about blocks, barriers, and room to align them to 1024 bytes."""
        keys, block = split_keys(self.head_dim), BLOCK_KEYS[self.head_dim]
        tiles, blocks = keys // _TILE_KEYS, keys // block
        stage = block * self.columns * 2
        value_stages = min(_VALUE_RING[self.ranks] // stage, blocks)
        rings = _KEY_WARPS * _KEY_RING + value_stages * stage
        own_tiles = _KEY_WARPS * -(-tiles // (self.ranks * _KEY_WARPS))
        scores = own_tiles * _TILE_KEYS * HEADS * 4 + tiles * _MAX_PITCH * 4
        query = HEADS * (self.head_dim * 2 + 16)
        said = (2 * blocks + 2) * HEADS * 4
        key_stages = _KEY_RING // (_TILE_KEYS * self.unit_dims * 2)
        barriers = _KEY_WARPS * key_stages + value_stages + 1 + blocks
        return rings + keys * HEADS * 2 + scores + query + said + barriers * 8 + 1024

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {**super().defines, "RANKS": self.ranks}


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for, from compute capability 9.0."""
    for ranks in RANKS:
        for variant in every(functools.partial(Variant, ranks=ranks)):
            if ranks in ranks_for(variant.head_dim):
                yield variant


def ranks_for(head_dim: int) -> tuple[int, ...]:
    """Thread blocks that may share a split: each has the columns of a warp at least."""
    return tuple(ranks for ranks in RANKS if head_dim // ranks >= _COLUMNS)


def variant_for(request: Request) -> Variant | None:
    """The build with the most ranks that the GPU can take all clusters of at once; None if there is
    none, or the call is no decode step. The bits are the same whoever serves it."""
    if request.max_seqlen_q != 1 or request.decode_units * _SMS_OF_UNIT > sms(request.device):
        return None
    for ranks in ranks_for(request.q.shape[2]):
        variant = Variant(*request.build, ranks)
        possible = maps_of(request, variant) and fits(variant, request.device, _CAPABILITIES)
        if possible and request.decode_units <= clusters_at_once(variant, request.device):
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
    """What a decode step launches with that build, which can take it."""
    from cuda.core import LaunchConfig

    config = LaunchConfig(
        grid=request.decode_units * variant.ranks,  # the source has the cluster's size
        block=variant.threads,
        shmem_size=variant.shared_bytes,
    )
    kernel = kernel_of(variant, request.device)
    found_by = (*divisors.of_task(request), divisors.of_pages(request))
    numbers = (*combine.numbers(request), *found_by)
    parts = Launch(config, kernel, numbers, maps_of(request, variant))
    one = request.splits == 1
    return Plan(request.device, (parts,), 0) if one else combine.after(request, parts)


def maps_of(request: Request, variant: Variant) -> tuple[TensorMap, ...]:
    """What the kernel takes after everything else; nothing where it cannot take the call."""
    return tensor_map.usable(
        tensor_map.of_tiles(tensor_map.K, request.k, _TILE_KEYS, variant.unit_dims),
        tensor_map.of_tiles(tensor_map.V, request.v, _TILE_KEYS, variant.columns),
    )
