"""Launching a source whose thread blocks take tiles of rows: the generic one, and the prefill's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rlbench.kernels.attention.launch import ClusterBuild, Launch, Plan, kernel_of

if TYPE_CHECKING:
    from torch import Tensor

    from rlbench.kernels.attention.request import Request
    from rlbench.kernels.attention.tensor_map import TensorMap

MAX_GRID = 2**31 - 1


_L2_BYTES = 24 << 20
"""Of keys and values that all thread blocks read at a time: about what a half of an H200's L2 holds,
since each half keeps what its SMs read."""


def section(q: Tensor, keys: float, pairs: int) -> int:
    """Of how many of these (sequence, KV head) pairs the tiles are worked on at a time: as many as have
    room for their keys and values, so many of each, in the L2, and a power of two."""
    fitting = _L2_BYTES / (keys * q.shape[2] * 2 * q.element_size() or 1)
    return min(pairs, 1 << max(0, int(fitting).bit_length() - 1))


def waiting(row_threads: int, head_dim: int) -> int:
    """fp32 elements that wait between splits (waiting.cuh): O, and a maximum and a sum for each of a
    thread's two rows."""
    return row_threads * (head_dim // 8 + 1) * 4


class TiledBuild(ClusterBuild, Protocol):
    """A build of such a source. The blocks of a cluster take neighbouring tiles."""

    @property
    def tile_rows(self) -> int:
        """Rows of a thread block."""

    @property
    def work(self) -> int:
        """fp32 elements of scratch memory that a block needs where rows have several splits, one at
        least: it takes the memory for a promise that they may."""


def plan(
    request: Request,
    build: TiledBuild,
    most_blocks: int = MAX_GRID,
    own_numbers: tuple[int, ...] = (),
    maps: tuple[TensorMap, ...] = (),
) -> Plan:
    """What the request launches.

    most_blocks: of a source whose blocks take several tiles.
    own_numbers: what the source takes after what both of them do.
    maps: what the build takes after everything else.
    Raises ValueError where there are more tiles than can be counted.
    """
    from cuda.core import LaunchConfig

    tiles = -(-request.max_seqlen_q * request.group // (build.tile_rows * build.ranks))
    places = tiles * request.kv_heads * request.sequences
    if places * build.ranks > MAX_GRID:
        raise ValueError(
            f"max_seqlen_q {request.max_seqlen_q} for {request.sequences} sequences and "
            f"{request.q.shape[1]} heads needs {places * build.ranks} thread blocks; at most {MAX_GRID} can be "
            "started"
        )
    blocks = min(places, max(1, most_blocks // build.ranks)) * build.ranks
    counts = (request.sequences, tiles, 1 if request.causal else 0)
    numbers = (*request.first_numbers, *counts, *request.scales, *own_numbers)
    config = LaunchConfig(grid=blocks, block=build.threads, shmem_size=build.shared_bytes)
    work = blocks * build.work if request.splits > 1 else 0
    launch = Launch(config, kernel_of(build, request.device), numbers, maps)
    return Plan(request.device, (launch,), work)
