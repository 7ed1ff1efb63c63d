"""The builds of `attention_combine.cu`, which merges splits after a decode kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention.launch import Launch, Plan, kernel_of

if TYPE_CHECKING:
    from rlbench.kernels.attention.request import Request


@dataclass(frozen=True)
class Combine:
    """One build of the source."""

    source: ClassVar[str] = "attention/attention_combine"
    shared_bytes: ClassVar[int] = 0

    head_dim: int
    element: str
    paged: bool

    @property
    def kernel(self) -> str:
        """The kernel's name, as a profiler shows it."""
        return f"rlbench_attention_combine_{suffix(self.head_dim, self.element, self.paged)}"

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {
            "HEAD_DIM": self.head_dim,
            "ELEMENT": self.element,
            "PAGED": int(self.paged),
            "KERNEL_NAME": self.kernel,
        }


def suffix(head_dim: int, element: str, paged: bool) -> str:
    """How the names of a build's kernels end."""
    return f"d{head_dim}_{element.lower()}_{'paged' if paged else 'packed'}"


def numbers(request: Request) -> tuple[int | float, ...]:
    """The parameters of the decode kernels and of this one, after the pointers."""
    return (*request.first_numbers, request.sequences, request.splits, *request.scales)


def after(request: Request, parts: Launch) -> Plan:
    """A decode kernel that leaves the parts of every row in scratch memory, and their merging."""
    from cuda.core import LaunchConfig

    _, heads, head_dim = request.q.shape
    config = LaunchConfig(
        grid=request.sequences * heads, block=head_dim, programmatic_stream_serialization=True
    )
    kernel = kernel_of(Combine(*request.build), request.device)
    # O, a maximum and four sums of each part.
    work = request.splits * request.sequences * heads * (head_dim + 5)
    return Plan(request.device, (parts, Launch(config, kernel, numbers(request))), work)
