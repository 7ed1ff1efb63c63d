"""The builds of `attention_stream_sm90.cu`, and when it serves a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention import combine, divisors, tensor_map
from rlbench.kernels.attention.family import Family, every
from rlbench.kernels.attention.launch import Launch, Plan, fits, kernel_of, sms
from rlbench.kernels.attention.request import BLOCK_KEYS, HEADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from rlbench.kernels.attention.request import Request
    from rlbench.kernels.attention.tensor_map import TensorMap

_CAPABILITIES = range(9, 12)  # from 12 on shared memory is too small
_FULL = 0.9
"""Of the SMs, what whole sequences have to keep busy until the end, else they are split."""


@dataclass(frozen=True)
class Variant(Family):
    """One build of the source, which checks shared_bytes."""

    name: ClassVar[str] = "stream"
    source: ClassVar[str] = "attention/attention_stream_sm90"
    threads: ClassVar[int] = 256

    tma: bool = False
    """K and V come by TMA. It does not change the bits."""

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return super().kernel + ("_tma" if self.tma else "")

    @property
    def box_keys(self) -> int:
        """Keys of a box: those of a page, or of a block."""
        return 16 if self.paged else BLOCK_KEYS[self.head_dim]

    @property
    def shared_bytes(self) -> int:
        """Stages of K and V, and room to align them; a block's weights, their sums by pairs, and
        largest scores; with TMA, a barrier for each stage."""
        keys = BLOCK_KEYS[self.head_dim]
        stages = 2 if self.head_dim == 256 else 3
        tiles = stages * 2 * keys * self.head_dim * 2
        said = (keys * 2 + keys // 2 * 4 + keys // 16 * 4 + 4) * HEADS
        barriers = stages * 8 if self.tma else 0
        return tiles + -(-(said + barriers) // 128) * 128 + (1024 - 128 if self.tma else 0)

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {**super().defines, "TMA": int(self.tma)}


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for, from compute capability 9.0."""
    for variant in every(Variant):
        yield variant
        yield replace(variant, tma=True)


def serves(request: Request) -> bool:
    """Whether the call is a decode step; the bits are the same whoever serves it."""
    if request.max_seqlen_q != 1:
        return False
    variant, _ = _build_of(request)
    possible = variant.tma or _copies_reach(request)
    return possible and fits(variant, request.device, _CAPABILITIES)


def _build_of(request: Request) -> tuple[Variant, tuple[TensorMap, ...]]:
    """The build that takes the call, and the maps that it takes."""
    variant = Variant(*request.build)
    if _copies_are_faster(request) and _copies_reach(request):
        return variant, ()
    maps = tensor_map.usable(
        tensor_map.of_ends(tensor_map.K, request.k, variant.box_keys),
        tensor_map.of_ends(tensor_map.V, request.v, variant.box_keys),
    )
    return replace(variant, tma=bool(maps)), maps


def _copies_are_faster(request: Request) -> bool:
    """Whether the memory limits, which likes a key's whole row at once better than a box's panels one
    after the other (measured on an H200: 2 to 8 % at 128 sequences of 8192). Where instructions do,
    TMA needs fewer."""
    rows = request.decode_units // request.splits
    narrow = request.q.shape[2] == 64  # more instructions for a byte
    return _keep_busy(request) and (rows > sms(request.device) or not narrow)


def _copies_reach(request: Request) -> bool:
    """Whether 32 bits are enough for where a key is in pages, in 16-byte chunks."""

    def last(tensor: Tensor) -> int:
        *sizes, _, _ = tensor.shape
        return sum((n - 1) * stride for n, stride in zip(sizes, tensor.stride(), strict=False)) // 8

    return request.block_table is None or max(last(request.k), last(request.v)) < 2**32


def takes_whole(request: Request) -> bool:
    """Whether a thread block takes all splits of a sequence, which saves merging them elsewhere:
    where whole sequences leave next to no SM idle at any time."""
    return request.splits == 1 or _keep_busy(request)


def _keep_busy(request: Request) -> bool:
    rows = request.decode_units // request.splits
    room = sms(request.device)
    return rows >= _FULL * -(-rows // room) * room


def plan(request: Request) -> Plan:
    """What a decode step launches. The device is the current one."""
    from cuda.core import LaunchConfig

    variant, maps = _build_of(request)
    whole = takes_whole(request)
    config = LaunchConfig(
        grid=request.decode_units // (request.splits if whole else 1),
        block=variant.threads,
        shmem_size=variant.shared_bytes,
    )
    numbers = (*combine.numbers(request), *divisors.of_task(request))
    if variant.tma:
        page_rows = tensor_map.page_rows(request.k), tensor_map.page_rows(request.v)
        numbers += (divisors.of_pages(request), *page_rows)
    parts = Launch(config, kernel_of(variant, request.device), numbers, maps)
    return Plan(request.device, (parts,), 0) if whole else combine.after(request, parts)
