"""Sequences laid out the ways engines take them: packed, or through a paged cache."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from math import prod

import torch

from rlbench.ops._inputs import hash_word, values
from rlbench.ops._op import Outputs
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedDecode, PagedPrefill
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.paging import block_table, page_order, pages_needed, slots

_JUNK = 0x57A1E
_JUNK_VALUES = 1048573
"""So many stale values are made and repeated: a prime, so that no two pages hold the same ones."""


def cumulative(lengths: Iterable[int], device: torch.device) -> torch.Tensor:
    """int32 [n + 1] offsets of packed sequences."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def rows(start: int, stop: int | None = None) -> RowsOf:
    """Take rows start:stop of every output."""
    return RowsOf(slice(start, stop))


class RowsOf:
    """Takes the same rows of every output tensor."""

    def __init__(self, which: slice) -> None:
        self.which = which

    def __call__(self, outputs: Outputs) -> Outputs:
        return {name: tensor[self.which] for name, tensor in outputs.items()}


def pack(
    sequences: Seq[Sequence],
    softmax_scale: float,
    spans: Seq[tuple[int, int]] | None = None,
    padding: int = 0,
) -> PackedPrefill:
    """Pack sequences; of each, queries `spans[i]` = [start, stop) against keys [0, stop).

    Without spans, whole sequences. `padding` rows follow the last one, as engines see when a
    captured graph is larger than its batch.
    """
    spans = spans or [(0, s.tokens) for s in sequences]
    q_lens = tuple(stop - start for start, stop in spans)
    k_lens = tuple(stop for _, stop in spans)
    q = [s.rows("q", start, stop) for s, (start, stop) in zip(sequences, spans, strict=True)]
    device = q[0].device
    if padding:
        q.append(torch.ones(padding, *q[0].shape[1:], dtype=q[0].dtype, device=device))
    return PackedPrefill(
        q=torch.cat(q),
        k=torch.cat([s.rows("k", 0, n) for s, n in zip(sequences, k_lens, strict=True)]),
        v=torch.cat([s.rows("v", 0, n) for s, n in zip(sequences, k_lens, strict=True)]),
        cu_seqlens_q=cumulative(q_lens, device),
        cu_seqlens_k=cumulative(k_lens, device),
        q_lens=q_lens,
        k_lens=k_lens,
        softmax_scale=softmax_scale,
    )


def pack_backward(sequences: Seq[Sequence], softmax_scale: float) -> PackedBackward:
    """Pack whole sequences together with the gradients of their outputs."""
    forward = pack(sequences, softmax_scale)
    return PackedBackward(**vars(forward), dout=torch.cat([s.whole("dout") for s in sequences]))


def page(
    sequences: Seq[Sequence],
    spans: Seq[tuple[int, int]],
    softmax_scale: float,
    *,
    page_size: int,
    shuffled: bool = False,
    junk: int | None = 1,
    decode: bool = False,
) -> PagedPrefill:
    """Queries `spans[i]` of each sequence against its keys [0, stop) in a paged cache.

    shuffled: pages in a scattered order instead of ascending. junk: which stale (finite) values
    stand in the slots that no key uses; None for NaN. Page 0 belongs to nobody.
    """
    k_lens = tuple(stop for _, stop in spans)
    q_lens = tuple(stop - start for start, stop in spans)
    pages = pages_needed(k_lens, page_size)
    like = sequences[0].rows("k", 0, 1)
    device = like.device
    table = block_table(page_order(sum(pages), shuffled), pages, device)
    where = slots(table, k_lens, page_size)
    shape = (sum(pages) + 1, page_size, *like.shape[1:])
    caches = []
    for number, name in enumerate(("k", "v")):
        cache = _stale(junk, number, shape, like)
        keys = [s.rows(name, 0, n) for s, n in zip(sequences, k_lens, strict=True)]
        cache.view(-1, *shape[2:])[where] = torch.cat(keys)
        caches.append(cache)
    kind = PagedDecode if decode else PagedPrefill
    return kind(
        q=torch.cat([s.rows("q", a, b) for s, (a, b) in zip(sequences, spans, strict=True)]),
        k_cache=caches[0],
        v_cache=caches[1],
        block_table=table,
        seqused_k=torch.tensor(k_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=cumulative(q_lens, device),
        q_lens=q_lens,
        k_lens=k_lens,
        softmax_scale=softmax_scale,
    )


def _stale(junk: int | None, number: int, shape: Seq[int], like: torch.Tensor) -> torch.Tensor:
    """A cache as others left it; `number` tells keys' from values'."""
    if junk is None:
        return like.new_full(tuple(shape), float("nan"))
    key = hash_word(_JUNK + 2 * junk + number)
    size = prod(shape)
    some = values(key, min(size, _JUNK_VALUES), like.dtype, str(like.device))
    return some.repeat(-(-size // _JUNK_VALUES))[:size].view(*shape)
