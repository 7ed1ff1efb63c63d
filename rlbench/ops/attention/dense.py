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
    """Run `attend` over a packed call's groups; [total_q, q_heads, dim], padding rows zero.

    Sequences that are all equally long are a dense batch already and are not copied. The others
    are split off, not sliced: the backward of a slice fills a tensor of the whole size.
    """
    found = groups(call.q_lens, call.k_lens)
    if len(found) == 1:
        joined = _attend_all(found[0], q, k, v, attend)
    else:
        joined = _attend_groups(call, found, (q, k, v), attend)
    padding = q.shape[0] - joined.shape[0]
    return torch.cat([joined, joined.new_zeros(padding, *joined.shape[1:])]) if padding else joined


def _attend_all(
    group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attend: Attend
) -> torch.Tensor:
    n = len(group.members)
    out = attend(_batch(q, n, group.q_len), _batch(k, n, group.k_len), _batch(v, n, group.k_len))
    return out.transpose(1, 2).flatten(0, 1)


def _batch(packed: torch.Tensor, n: int, length: int) -> torch.Tensor:
    """[total, heads, dim] -> [n, heads, length, dim], a view."""
    used = packed if packed.shape[0] == n * length else packed[: n * length]
    return used.view(n, length, *packed.shape[1:]).transpose(1, 2)


def _attend_groups(
    call: PackedPrefill, found: list[Group], qkv: tuple[torch.Tensor, ...], attend: Attend
) -> torch.Tensor:
    q, k, v = (
        torch.split(packed, [*lengths, packed.shape[0] - sum(lengths)])
        for packed, lengths in zip(qkv, (call.q_lens, call.k_lens, call.k_lens), strict=True)
    )
    pieces: dict[int, torch.Tensor] = {}
    for group in found:
        batch = (torch.stack([t[i] for i in group.members]).transpose(1, 2) for t in (q, k, v))
        pieces.update(zip(group.members, attend(*batch).transpose(1, 2).unbind(), strict=True))
    return torch.cat([pieces[i] for i in range(len(call.q_lens))])


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
