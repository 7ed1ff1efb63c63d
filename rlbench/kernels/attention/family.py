"""What the builds of every source have in common: what they are built for, and their macros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rlbench.kernels.attention.request import BLOCK_KEYS, ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Family:
    """One build of one source. A source's `Variant` says which, and what it takes."""

    name: ClassVar[str]
    """In the kernel's name, as a profiler shows it."""
    source: ClassVar[str]
    """The source's path, as `jit.load` takes it."""

    head_dim: int
    element: str
    paged: bool

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        layout = "paged" if self.paged else "packed"
        return f"rlbench_attention_{self.name}_d{self.head_dim}_{self.element.lower()}_{layout}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {
            "HEAD_DIM": self.head_dim,
            "ELEMENT": self.element,
            "PAGED": int(self.paged),
            "SHARED_BYTES": self.shared_bytes,
            "KERNEL_NAME": self.kernel,
        }


_V = TypeVar("_V")


def every(variant: Callable[[int, str, bool], _V]) -> Iterator[_V]:
    """Its builds for all that a call can ask for."""
    for head_dim in BLOCK_KEYS:
        for element in ELEMENTS.values():
            for paged in (False, True):
                yield variant(head_dim, element, paged)
