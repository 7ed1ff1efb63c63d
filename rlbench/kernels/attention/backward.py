"""The gradients: the builds of `attention_backward_queries.cu` and `attention_backward_keys.cu`, and what
a backward launches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from rlbench.kernels.attention import tensor_map, tiles
from rlbench.kernels.attention.family import Family, every
from rlbench.kernels.attention.launch import Launch, Plan, fits, kernel_of, sms
from rlbench.kernels.attention.request import ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.tensor_map import TensorMap

DELTA = 9
"""Which of the kernels' pointers is scratch memory: a float for every row, and what chunks hand on."""
CHUNK_ROWS = 16384
"""(position, head in group) pairs whose contributions to dk and dv are one chain; part of the definition."""
_TASK = 32  # bytes of a thread block's task
_CAPABILITIES = range(9, 10)  # wgmma
_SMALL_TILE = 32  # where there is little shared memory, at head dim 256


@dataclass(frozen=True)
class Backward:
    """Gradients to compute, of packed sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    sequences: int
    max_seqlen_q: int
    causal: bool
    softmax_scale: float

    @property
    def device(self) -> int:
        index = self.q.device.index
        assert index is not None
        return index

    @property
    def build(self) -> tuple[int, str, bool]:
        """What every source is built for: head_dim, element, paged."""
        return self.q.shape[2], ELEMENTS[self.q.dtype], False

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The parameters after the pointers, in the order of backward.cuh."""
        tensors = self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv
        strides = (stride for tensor in tensors for stride in tensor.stride()[:2])
        counts = self.kv_heads, self.group, self.sequences, 1 if self.causal else 0
        return (
            *strides,
            *counts,
            float(self.softmax_scale),
            self.softmax_scale * math.log2(math.e),
        )


@dataclass(frozen=True)
class Queries(Family):
    """A build of the one source. `tile`, its rows of a thread block, does not change the bits."""

    name: ClassVar[str] = "backward_queries"
    source: ClassVar[str] = "attention/attention_backward_queries"

    ranks: ClassVar[int] = 1
    tile: int = 64

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return f"{super().kernel}_t{self.tile}"

    @property
    def at_a_time(self) -> int:
        """Keys that are multiplied by at a time."""
        return 32 if self.head_dim == 256 else 64

    @property
    def threads(self) -> int:
        """Threads of a block: a warp for 16 rows."""
        return self.tile * 2

    @property
    def shared_bytes(self) -> int:
        """Q and dO, K and V."""
        return 2 * (self.tile + self.at_a_time) * self.head_dim * 2

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {**super().defines, "TILE_ROWS": self.tile}


@dataclass(frozen=True)
class Keys(Queries):
    """A build of the other source. Here `tile` is keys, and rows come some at a time."""

    name: ClassVar[str] = "backward_keys"
    source: ClassVar[str] = "attention/attention_backward_keys"

    @property
    def threads(self) -> int:
        """Threads of a block: two warps for 16 keys."""
        return self.tile * 4

    @property
    def shared_bytes(self) -> int:
        """Q and dO, K and V, and three words of each row."""
        return super().shared_bytes + self.at_a_time * 12

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        rest = {name: value for name, value in super().defines.items() if name != "TILE_ROWS"}
        return {**rest, "TILE_KEYS": self.tile, "CHUNK_ROWS": CHUNK_ROWS}


@dataclass(frozen=True)
class Hopper(Family):
    """A build with a producer and two consumer warpgroups. What it takes `at_a_time` are keys, where `tile`
    is rows, and the other way round."""

    threads: ClassVar[int] = 384
    tile: ClassVar[int]
    at_a_time: ClassVar[int] = 64
    ranks: ClassVar[int] = 1
    """Thread blocks of a cluster, which share what they go through."""


@dataclass(frozen=True)
class HopperKeys(Hopper):
    """A build of `attention_backward_keys_sm90.cu`, which has the bits of `Keys`, for head dims 64 and
    128."""

    name: ClassVar[str] = "backward_keys_hopper"
    source: ClassVar[str] = "attention/attention_backward_keys_sm90"
    tile: ClassVar[int] = 128

    @property
    def shared_bytes(self) -> int:
        """K and V, stages of Q and dO and of three words of each row, barriers, the task, and room to align
        it all to 1024."""
        stages = 6 if self.head_dim == 64 else 3
        tiles = 2 * self.tile + stages * 2 * self.at_a_time
        barriers = (2 * stages + 1) * 8
        return tiles * self.head_dim * 2 + stages * self.at_a_time * 12 + barriers + _TASK + 1024

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {**super().defines, "CHUNK_ROWS": CHUNK_ROWS}


@dataclass(frozen=True)
class WideHopperKeys(HopperKeys):
    """The same of `attention_backward_keys_wide_sm90.cu`, for head dim 256."""

    source: ClassVar[str] = "attention/attention_backward_keys_wide_sm90"
    tile: ClassVar[int] = 64
    ranks: ClassVar[int] = 2

    @property
    def shared_bytes(self) -> int:
        """K and V, two stages of Q and dO, weights, three words of each row, barriers, the task, and room
        to align it all to 1024."""
        tiles = 2 * self.tile + 2 * 2 * self.at_a_time
        said = 128 * self.at_a_time * 2 + 2 * self.at_a_time * 12
        return tiles * self.head_dim * 2 + said + 5 * 8 + _TASK + 1024


@dataclass(frozen=True)
class HopperQueries(Hopper):
    """A build of `attention_backward_queries_sm90.cu`, which has the bits of `Queries`, for head dims 64
    and 128."""

    name: ClassVar[str] = "backward_queries_hopper"
    source: ClassVar[str] = "attention/attention_backward_queries_sm90"
    tile: ClassVar[int] = 128
    stays: ClassVar[bool] = True
    """A thread block can take tile after tile."""

    @property
    def shared_bytes(self) -> int:
        """Two tiles of Q and dO, with a note each and two words of each row, three stages of K and V, and
        barriers."""
        tiles = 2 * 2 * self.tile + 3 * 2 * self.at_a_time
        return tiles * self.head_dim * 2 + 2 * (48 + self.tile * 8) + 10 * 8


@dataclass(frozen=True)
class WideHopperQueries(HopperQueries):
    """The same of `attention_backward_queries_wide_sm90.cu`, for head dim 256."""

    source: ClassVar[str] = "attention/attention_backward_queries_wide_sm90"
    tile: ClassVar[int] = 64
    ranks: ClassVar[int] = 2
    stays: ClassVar[bool] = False

    @property
    def shared_bytes(self) -> int:
        """Three stages of K and V, weights and their rounded gradients, barriers, and room to align it
        all to 1024."""
        said = 128 * self.at_a_time * 2 + 128 * self.at_a_time
        return 3 * 2 * self.at_a_time * self.head_dim * 2 + said + 7 * 8 + 1024


def _hopper(head_dim: int) -> tuple[type[HopperQueries], type[HopperKeys]]:
    """What finds dq on Hopper, and what finds dk and dv."""
    if head_dim > 128:
        return WideHopperQueries, WideHopperKeys
    return HopperQueries, HopperKeys


def hopper_variants() -> Iterator[HopperQueries | HopperKeys]:
    """Every build that a call can ask for; for sm_90a alone."""
    for variant in every(Queries):
        if not variant.paged:
            for kind in _hopper(variant.head_dim):
                yield kind(variant.head_dim, variant.element, variant.paged)


def variants() -> Iterator[Queries]:
    """Every build that a call can ask for."""
    for kind in (Queries, Keys):
        for variant in every(kind):
            if variant.paged:
                continue
            yield variant
            if variant.head_dim == 256:
                yield replace(variant, tile=_SMALL_TILE)


def plan(request: Backward) -> Plan:
    """What the request launches. The device is the current one."""
    from cuda.core import LaunchConfig

    queries, key_maps = _queries_of(request)
    keys, maps = _keys_of(request)
    pairs = request.kv_heads * request.sequences
    row_tiles = -(-request.max_seqlen_q * request.group // (queries.tile * queries.ranks))
    # One more for each sequence, since none has to end where a tile does.
    key_tiles = request.k.shape[0] // (keys.tile * keys.ranks) + request.sequences
    units = key_tiles * request.kv_heads * keys.ranks
    chunks = -(-request.max_seqlen_q * request.group // CHUNK_ROWS)
    blocks = row_tiles * pairs * queries.ranks, units * chunks
    if max(blocks) > tiles.MAX_GRID:
        raise ValueError(
            f"max_seqlen_q {request.max_seqlen_q} and {request.k.shape[0]} keys for "
            f"{request.sequences} sequences need {max(blocks)} thread blocks; at most "
            f"{tiles.MAX_GRID} can be started"
        )
    scratch = _scratch(request, keys, units, chunks)

    def launch(
        build: Queries | Hopper, grid: int, own: tuple[int, ...], maps: tuple[TensorMap, ...]
    ) -> Launch:
        config = LaunchConfig(grid=grid, block=build.threads, shmem_size=build.shared_bytes)
        kernel = kernel_of(build, request.device)
        numbers = units, chunks, scratch.flags_at, scratch.waiting_at
        return Launch(config, kernel, (*request.numbers, *numbers, *own), maps)

    # Kernels with maps also take the number of their tensors' rows.
    section = tiles.section(request.q, request.k.shape[0] / request.sequences, pairs)
    of_queries = row_tiles, *((request.k.shape[0], section) if key_maps else ())
    of_keys = request.q.shape[:1] if maps else ()
    launches = (
        launch(queries, min(blocks[0], _most_blocks(request, queries)), of_queries, key_maps),
        launch(keys, blocks[1], of_keys, maps),
    )
    return Plan(request.device, launches, scratch.elements, DELTA)


class _Scratch(NamedTuple):
    """fp32 elements: delta, flags, and the sums that chunks hand on, of two gradients."""

    flags_at: int
    waiting_at: int
    elements: int


def _scratch(request: Backward, keys: Keys | HopperKeys, units: int, chunks: int) -> _Scratch:
    flags_at = _aligned(request.q.shape[0] * request.q.shape[1])
    if chunks == 1:
        return _Scratch(flags_at, flags_at, flags_at)
    waiting_at = flags_at + _aligned(2 * units)
    return _Scratch(flags_at, waiting_at, waiting_at + units * keys.tile * request.q.shape[2] * 2)


def _most_blocks(request: Backward, queries: Queries | HopperQueries) -> int:
    """How many of them take the tiles of rows. Where all sequences are equally long, dealing tiles out in
    turns is fair; where they are not, the GPU does it, as blocks become free."""
    even = request.q.shape[0] == request.sequences * request.max_seqlen_q
    stays = isinstance(queries, HopperQueries) and queries.stays
    return sms(request.device) if even and stays else tiles.MAX_GRID


def _aligned(elements: int) -> int:
    """fp32 elements, to 16 bytes."""
    return -(-elements // 4) * 4


def _queries_of(
    request: Backward,
) -> tuple[Queries | HopperQueries, tuple[TensorMap, ...]]:
    """What finds dq, and the maps that it takes after everything else."""
    hopper = _hopper(request.q.shape[2])[0](*request.build)
    maps = tensor_map.usable(
        tensor_map.of_keys(tensor_map.K, request.k, hopper.ranks, hopper.at_a_time),
        tensor_map.of_keys(tensor_map.V, request.v, hopper.ranks, hopper.at_a_time),
    )
    if maps and fits(hopper, request.device, _CAPABILITIES):
        return hopper, maps
    return _fitting(Queries(*request.build), request.device), ()


def _keys_of(request: Backward) -> tuple[Keys | HopperKeys, tuple[TensorMap, ...]]:
    """What finds dk and dv, and the maps that it takes after everything else."""
    hopper = _hopper(request.q.shape[2])[1](*request.build)
    maps = tensor_map.usable(
        tensor_map.of_rows(tensor_map.Q, request.q, request.group, hopper.at_a_time, hopper.ranks),
        tensor_map.of_rows(
            tensor_map.DOUT, request.dout, request.group, hopper.at_a_time, hopper.ranks
        ),
    )
    if maps and fits(hopper, request.device, _CAPABILITIES):
        return hopper, maps
    return _fitting(Keys(*request.build), request.device), ()


_V = TypeVar("_V", bound=Queries)


def _fitting(build: _V, device: int) -> _V:
    """The build, with the tile that the device's shared memory has room for.

    Raises ValueError for a device older than compute capability 8.0.
    """
    from cuda.core import Device

    machine = Device(device)
    major, minor = machine.compute_capability
    if major < 8:
        raise ValueError(
            f"q is on a device of compute capability {major}.{minor}; attention needs 8.0"
        )
    if build.shared_bytes > machine.properties.max_shared_memory_per_block_optin:
        return replace(build, tile=_SMALL_TILE)
    return build
