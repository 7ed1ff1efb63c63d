"""Packed and paged calls as dense batches, for engines that know only [batch, heads, tokens, dim].

Sequences of equal lengths go into one launch, as such an engine's user would batch them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [n, q_heads, Lq, dim], k and v [n, kv_heads, Lk, dim] -> out [n, q_heads, Lq, dim]."""


@dataclass(frozen=True)
class Group:
    """Sequences with the same number of queries and of keys."""

    q_len: int
    k_len: int
    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    members: tuple[int, ...]


def groups(q_lens: tuple[int, ...], k_lens: tuple[int, ...]) -> list[Group]:
    """The sequences grouped by their lengths, in order of first appearance."""
    q_starts = [0, *accumulate(q_lens)]
    k_starts = [0, *accumulate(k_lens)]
    by_length: dict[tuple[int, int], list[int]] = {}
    for i, lengths in enumerate(zip(q_lens, k_lens, strict=True)):
        by_length.setdefault(lengths, []).append(i)
    return [
        Group(
            *lengths,
            tuple(q_starts[i] for i in members),
            tuple(k_starts[i] for i in members),
            tuple(members),
        )
        for lengths, members in by_length.items()
    ]


def gather(packed: torch.Tensor, starts: tuple[int, ...], length: int) -> torch.Tensor:
    """[total, heads, dim] -> [len(starts), heads, length, dim]."""
    return torch.stack([packed[s : s + length] for s in starts]).transpose(1, 2)


def attend_packed(
    call: PackedPrefill, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Run `attend` over a packed call's groups; [total_q, q_heads, dim], padding rows zero."""
    pieces: list[torch.Tensor | None] = [None] * len(call.q_lens)
    for group in groups(call.q_lens, call.k_lens):
        out = attend(
            gather(q, group.q_starts, group.q_len),
            gather(k, group.k_starts, group.k_len),
            gather(v, group.k_starts, group.k_len),
        ).transpose(1, 2)
        for row, member in enumerate(group.members):
            pieces[member] = out[row]
    joined = torch.cat([piece for piece in pieces if piece is not None])
    padding = q.shape[0] - joined.shape[0]
    return torch.cat([joined, joined.new_zeros(padding, *joined.shape[1:])]) if padding else joined


def attend_paged(call: PagedPrefill, attend: Attend) -> torch.Tensor:
    """Run `attend` over a paged call's groups, gathering each group's pages first."""
    out = torch.empty_like(call.q)
    for group in groups(call.q_lens, call.k_lens):
        pages = -(-group.k_len // call.page_size)
        whole = len(group.members) == len(call.q_lens)
        table = call.block_table if whole else call.block_table[list(group.members)]
        table = table[:, :pages]
        result = attend(
            gather(call.q, group.q_starts, group.q_len),
            read_pages(call.k_cache, table, group.k_len),
            read_pages(call.v_cache, table, group.k_len),
        ).transpose(1, 2)
        for row, start in enumerate(group.q_starts):
            out[start : start + group.q_len] = result[row]
    return out


def read_pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[blocks, page, heads, dim] through [n, pages] -> [n, heads, length, dim]."""
    gathered = cache[table].flatten(1, 2)
    return gathered[:, :length].transpose(1, 2)
