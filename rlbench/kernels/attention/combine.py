"""The builds of `attention_combine.cu`, which merges splits after a decode kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention.family import Family, every
from rlbench.kernels.attention.launch import Launch, Plan, kernel_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.request import Request


@dataclass(frozen=True)
class Variant(Family):
    """One build of the source, which checks shared_bytes."""

    name: ClassVar[str] = "combine"
    source: ClassVar[str] = "attention/attention_combine"

    shared_bytes: ClassVar[int] = 0


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for, from compute capability 9.0."""
    return every(Variant)


def numbers(request: Request) -> tuple[int | float, ...]:
    """The parameters of the decode kernels and of this one, after the pointers."""
    return (*request.first_numbers, request.sequences, request.splits, *request.scales)


def after(request: Request, parts: Launch) -> Plan:
    """A decode kernel that leaves the parts of every row in scratch memory, and their merging."""
    from cuda.core import LaunchConfig

    _, heads, head_dim = request.q.shape
    variant = Variant(*request.build)
    config = LaunchConfig(
        grid=request.sequences * heads,
        block=head_dim,
        shmem_size=variant.shared_bytes,
        programmatic_stream_serialization=True,
    )
    kernel = kernel_of(variant, request.device)
    # O, a maximum and four sums of each part.
    work = request.splits * request.sequences * heads * (head_dim + 5)
    return Plan(request.device, (parts, Launch(config, kernel, numbers(request))), work)
