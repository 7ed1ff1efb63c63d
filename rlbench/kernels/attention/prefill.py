"""The builds of `attention_prefill_sm90.cu`, and when it serves a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention import tensor_map, tiles
from rlbench.kernels.attention.family import Family, every
from rlbench.kernels.attention.launch import clusters_at_once, fits, sms
from rlbench.kernels.attention.request import BLOCK_KEYS, split_keys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.launch import Plan
    from rlbench.kernels.attention.request import Request
    from rlbench.kernels.attention.tensor_map import TensorMap

_NARROW = 64  # head dim
_STAGES = 2  # of K and of V
_CAPABILITIES = range(9, 10)  # wgmma
_SHARED = (128, 256)
"""Head dims at which the blocks of a cluster can share K and V: they have several panels."""


@dataclass(frozen=True)
class Variant(Family):
    """One build of the source, which checks shared_bytes."""

    name: ClassVar[str] = "prefill"
    source: ClassVar[str] = "attention/attention_prefill_sm90"

    tma: bool = False
    """Packed K and V come by TMA. It does not change the bits."""
    tma_q: bool = False
    """Q does. That does not either."""
    ranks: int = 1
    """Thread blocks of a cluster, which share K and V. Nor does that."""

    @property
    def consumers(self) -> int:
        """Consumer warpgroups: as many as find registers for their accumulators."""
        return 3 if self.tma and self.head_dim == _NARROW else 2

    @property
    def tile_rows(self) -> int:
        """Rows of a thread block."""
        return 64 * self.consumers

    @property
    def row_threads(self) -> int:
        return 128 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and the producer's warpgroup."""
        return 128 + self.row_threads

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        own = ("_tma" if self.tma else "") + ("_tmaq" if self.tma_q else "")
        return super().kernel + own + (f"_r{self.ranks}" if self.ranks > 1 else "")

    @property
    def waiting(self) -> int:
        """Chunks of a thread that wait in shared memory between splits, where there is room: O and,
        at head dim 64, maxima and sums."""
        return {64: 8 + 1, 128: 16, 256: 0}[self.head_dim]

    @property
    def work(self) -> int:
        """fp32 elements of scratch memory for a block, between splits."""
        return 1 if self.waiting else tiles.waiting(self.row_threads, self.head_dim)

    @property
    def shared_bytes(self) -> int:
        """Q, the stages of K and V, O between splits, the notes of two tiles, barriers, and room to
        align it all to 1024."""
        rows = self.tile_rows + 2 * _STAGES * BLOCK_KEYS[self.head_dim]
        waiting = self.row_threads * self.waiting * 16
        notes = 2 * (4 + self.tile_rows) * 4
        return rows * self.head_dim * 2 + waiting + notes + (4 * _STAGES + 1) * 8 + 1024

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        own = {"TMA": int(self.tma), "TMA_Q": int(self.tma_q), "CONSUMERS": self.consumers}
        return {**super().defines, **own, "RANKS": self.ranks}


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for; for sm_90a alone."""
    for variant in every(Variant):
        for tma in (False,) if variant.paged else (False, True):
            for tma_q in (False, True):
                yield replace(variant, tma=tma, tma_q=tma_q)
        if not variant.paged and variant.head_dim in _SHARED:
            yield replace(variant, tma=True, tma_q=True, ranks=2)


def serves(request: Request) -> bool:
    """Whether this kernel can take the call; the generic kernel's bits are the same."""
    more_than_decode = request.max_seqlen_q > 1
    return more_than_decode and fits(Variant(*request.build), request.device, _CAPABILITIES)


def plan(request: Request) -> Plan:
    """What the request launches. The device is the current one."""
    # Tiles are dealt out in turns, which is fair where all sequences are equally long; where they
    # are not, the GPU deals them out as blocks become free.
    if request.q.shape[0] != request.sequences * request.max_seqlen_q:
        build, maps = build_of(request)
        return tiles.plan(request, build, tiles.MAX_GRID, own_numbers(request), maps)
    # K and V are worth sharing where they are long.
    build, maps = build_of(request, 2 if request.splits > 1 else 1)
    most_blocks = sms(request.device)
    if build.ranks > 1:
        most_blocks = clusters_at_once(build, request.device) * build.ranks
    return tiles.plan(request, build, most_blocks, own_numbers(request), maps)


def own_numbers(request: Request) -> tuple[int, ...]:
    """What the source takes after the numbers that the generic one takes, too."""
    return (section(request),)


def section(request: Request) -> int:
    """Of how many KV heads of sequences the tiles are worked on at a time."""
    if request.block_table is None:
        keys = request.k.shape[0] / request.sequences
    else:
        keys = request.splits * split_keys(request.q.shape[2])
    return tiles.section(request.q, keys, request.kv_heads * request.sequences)


def build_of(request: Request, ranks: int = 1) -> tuple[Variant, tuple[TensorMap, ...]]:
    """What serves the request, and the maps that it takes after everything else: TMA copies what
    there can be a map of. Clusters have so many ranks, if they can."""
    keys = _maps_of_keys(request, 1)
    build = Variant(*request.build, tma=bool(keys))
    of_q = tensor_map.of_queries(tensor_map.Q, request.q, request.group, build.tile_rows)
    queries = tensor_map.usable(of_q)
    if ranks > 1 and keys and queries and request.q.shape[2] in _SHARED:
        build, keys = replace(build, ranks=ranks), _maps_of_keys(request, ranks)
    return replace(build, tma_q=bool(queries)), (*queries, *keys)


def _maps_of_keys(request: Request, parts: int) -> tuple[TensorMap, ...]:
    if request.block_table is not None:
        return ()
    return tensor_map.usable(
        tensor_map.of_keys(tensor_map.K, request.k, parts),
        tensor_map.of_keys(tensor_map.V, request.v, parts),
    )
