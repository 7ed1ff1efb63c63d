"""Divisions that kernels make by numbers which the host knows: a multiplication and a shift."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.kernels.attention.request import HEADS

if TYPE_CHECKING:
    from rlbench.kernels.attention.request import Request


def divisor(size: int) -> int:
    """What divides numbers below 2^31 by `size`, from 1 to there: a factor in the low 32 bits, and
    by how much the product's high half is shifted (Granlund and Montgomery, 1994); 0 for 1."""
    if size == 1:
        return 0
    log = (size - 1).bit_length()
    return -(-(1 << (31 + log)) // size) | (log - 1) << 32


def of_task(request: Request) -> tuple[int, int, int]:
    """By which a decode kernel finds a thread block's task (decode_task.cuh)."""
    head_tiles = -(-request.group // HEADS)
    return divisor(head_tiles), divisor(request.kv_heads), divisor(request.sequences)


def of_pages(request: Request) -> int:
    """By which a key's page is found; packed keys have none."""
    return 0 if request.block_table is None else divisor(request.k.shape[1])
