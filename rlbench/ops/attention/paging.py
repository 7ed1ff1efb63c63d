"""Where a paged cache keeps which key; packed keys put into such a cache, and taken out of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from math import gcd

import torch

from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill


def pages_needed(k_lens: tuple[int, ...], page_size: int) -> list[int]:
    """How many pages each sequence fills."""
    return [-(-n // page_size) for n in k_lens]


def page_order(pages: int, shuffled: bool) -> list[int]:
    """Page numbers 1..pages in the order they are handed out; shuffled by a coprime stride."""
    if not shuffled:
        return list(range(1, pages + 1))
    stride = next(s for s in range(max(2, pages * 5 // 8), 2 * pages + 3) if gcd(s, pages) == 1)
    return [(i * stride + pages // 2) % pages + 1 for i in range(pages)]


def block_table(order: list[int], pages: list[int], device: torch.device) -> torch.Tensor:
    """int32 [sequences, max(pages)]: the pages of `order`, dealt out; 0 where none is needed."""
    width = max(pages)
    lines, first = [], 0
    for count in pages:
        lines.append(order[first : first + count] + [0] * (width - count))
        first += count
    return torch.tensor(lines, dtype=torch.int32, device=device)


def slots(table: torch.Tensor, k_lens: tuple[int, ...], page_size: int) -> torch.Tensor:
    """int64 [sum(k_lens)]: every key's row in a cache flattened to [blocks * page_size, …]."""
    within = torch.arange(page_size, device=table.device)
    of_pages = (table.long()[..., None] * page_size + within).flatten(1)
    return torch.cat([line[:n] for line, n in zip(of_pages, k_lens, strict=True)])


def to_pages(call: PackedPrefill, page_size: int) -> PagedPrefill:
    """The same attention with its keys and values copied into a paged cache, page 0 unused.

    For engines that read keys from pages only: filling the cache is another kernel's work there,
    done as the keys are made, so a binder may do it.
    """
    pages = pages_needed(call.k_lens, page_size)
    table = block_table(page_order(sum(pages), shuffled=False), pages, call.k.device)
    where = slots(table, call.k_lens, page_size)

    def cache(packed: torch.Tensor) -> torch.Tensor:
        blank = packed.new_zeros(sum(pages) + 1, page_size, *packed.shape[1:])
        blank.view(-1, *packed.shape[1:])[where] = packed
        return blank

    return PagedPrefill(
        q=call.q,
        k_cache=cache(call.k),
        v_cache=cache(call.v),
        block_table=table,
        seqused_k=torch.tensor(call.k_lens, dtype=torch.int32, device=call.k.device),
        cu_seqlens_q=call.cu_seqlens_q,
        q_lens=call.q_lens,
        k_lens=call.k_lens,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
    )


def unpage(call: PagedPrefill) -> tuple[PackedPrefill, Callable[[], tuple[torch.Tensor, ...]]]:
    """The same attention over packed keys, and what copies k and v out of the pages anew.

    For engines that know no pages. Such an engine's user copies at every step, so a binder takes
    the lengths from the call and runs the copy each time.
    """
    where = slots(call.block_table, call.k_lens, call.page_size)

    def copy() -> tuple[torch.Tensor, ...]:
        return tuple(cache.flatten(0, 1)[where] for cache in (call.k_cache, call.v_cache))

    k, v = copy()
    starts = torch.tensor([0, *accumulate(call.k_lens)], dtype=torch.int32, device=k.device)
    return PackedPrefill(
        q=call.q,
        k=k,
        v=v,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=starts,
        q_lens=call.q_lens,
        k_lens=call.k_lens,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
    ), copy
