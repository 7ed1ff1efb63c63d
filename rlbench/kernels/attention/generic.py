"""The builds of `attention_generic.cu`, which can serve every call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rlbench.kernels.attention import tiles
from rlbench.kernels.attention.family import Family, every
from rlbench.kernels.attention.request import BLOCK_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.launch import Plan
    from rlbench.kernels.attention.request import Request


@dataclass(frozen=True)
class Variant(Family):
    """One build of the source. Only `tile_rows` is a free choice: it does not change the bits."""

    name: ClassVar[str] = "generic"
    source: ClassVar[str] = "attention/attention_generic"
    ranks: ClassVar[int] = 1

    tile_rows: int = 64

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return f"{super().kernel}_m{self.tile_rows}"

    @property
    def threads(self) -> int:
        """Threads of a block: one warp for 16 rows."""
        return self.tile_rows * 2

    @property
    def work(self) -> int:
        """fp32 elements of scratch memory for a block, between splits."""
        return tiles.waiting(self.threads, self.head_dim)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: its rows of Q, one block of K, one of V."""
        return (self.tile_rows + 2 * BLOCK_KEYS[self.head_dim]) * self.head_dim * 2

    @property
    def defines(self) -> dict[str, str | int]:
        """The macros that the source takes."""
        return {**super().defines, "TILE_ROWS": self.tile_rows}


def variants() -> Iterator[Variant]:
    """Every build that a call can ask for."""
    for variant in every(Variant):
        yield variant
        if variant.head_dim == 256:
            yield replace(variant, tile_rows=32)


def plan(request: Request) -> Plan:
    """What the request launches. The device is the current one."""
    return tiles.plan(request, fitting_variant(*request.build, request.device))


def fitting_variant(head_dim: int, element: str, paged: bool, device: int) -> Variant:
    """The build with as many rows as the device's shared memory has room for.

    Raises ValueError for a device older than compute capability 8.0.
    """
    from cuda.core import Device

    machine = Device(device)
    major, minor = machine.compute_capability
    if major < 8:
        raise ValueError(
            f"q is on a device of compute capability {major}.{minor}; attention needs 8.0"
        )
    variant = Variant(head_dim, element, paged)
    # Some GPUs (8.6, 8.9, 12.0) have 99 KiB of shared memory for a block: half the rows fit.
    if variant.shared_bytes > machine.properties.max_shared_memory_per_block_optin:
        variant = Variant(head_dim, element, paged, tile_rows=32)
    return variant
