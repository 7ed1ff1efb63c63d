"""Packing and paging: every token stands where the call says, whatever the page size and order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rlbench.measure.bits import digest
from rlbench.ops.attention.calls import PackedPrefill, PagedDecode, PagedPrefill
from rlbench.ops.attention.dense import attend_packed, gather, groups
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import cumulative, pack, pack_backward, page, rows
from rlbench.ops.attention.paging import page_order, to_pages, unpage

SHAPE: dict[str, Any] = {"q_heads": 2, "kv_heads": 1, "head_dim": 4}


def sequence(stream: int, tokens: int, dtype: str = "bf16") -> Sequence:
    return Sequence(stream, tokens, dtype=dtype, device="cpu", **SHAPE)


def read_back(call: PagedPrefill, i: int, cache: torch.Tensor) -> torch.Tensor:
    """Sequence i's keys, one slot at a time, as the call's documentation has it."""
    slots = []
    for j in range(int(call.seqused_k[i])):
        block = int(call.block_table[i, j // call.page_size])
        slots.append(cache[block, j % call.page_size])
    return torch.stack(slots)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 32, 64, 128, 256])
def test_pages_read_back_are_the_sequences(page_size: int, shuffled: bool, dtype: str) -> None:
    sequences = [sequence(i, n, dtype) for i, n in enumerate((1, 16, 33, 64, 150))]
    spans = [(0, 1), (0, 16), (30, 33), (63, 64), (10, 100)]
    call = page(sequences, spans, 0.5, page_size=page_size, shuffled=shuffled)
    assert call.page_size == page_size
    assert call.k_lens == (1, 16, 33, 64, 100) == tuple(call.seqused_k.tolist())
    assert call.q_lens == (1, 16, 3, 1, 90)
    for i, (one, (start, stop)) in enumerate(zip(sequences, spans, strict=True)):
        assert torch.equal(read_back(call, i, call.k_cache), one.rows("k", 0, stop))
        assert torch.equal(read_back(call, i, call.v_cache), one.rows("v", 0, stop))
        first, last = call.cu_seqlens_q[i : i + 2].tolist()
        assert torch.equal(call.q[first:last], one.rows("q", start, stop))


@pytest.mark.parametrize("decode", [False, True])
def test_unpaged_is_the_call_that_was_never_paged(decode: bool) -> None:
    sequences = [sequence(i, n) for i, n in enumerate((1, 16, 33, 64))]
    spans = [(s.tokens - 1, s.tokens) if decode else (s.tokens // 2, s.tokens) for s in sequences]
    paged = page(sequences, spans, 0.5, page_size=16, shuffled=True, decode=decode)
    (got, copy), want = unpage(paged), pack(sequences, 0.5, spans)
    assert type(got) is PackedPrefill
    assert vars(got).keys() == vars(want).keys()
    for name, value in vars(want).items():
        mine = getattr(got, name)
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name
    assert got.cu_seqlens_k.dtype == torch.int32
    paged.k_cache.neg_()
    k, v = copy()
    assert torch.equal(k, -want.k), "the copy is of what stands in the pages now"
    assert torch.equal(v, want.v)


@pytest.mark.parametrize("shuffled", [False, True])
def test_no_page_is_shared_and_page_zero_belongs_to_nobody(shuffled: bool) -> None:
    sequences = [sequence(i, n) for i, n in enumerate((40, 5, 64))]
    spans = [(0, s.tokens) for s in sequences]
    call = page(sequences, spans, 1.0, page_size=16, shuffled=shuffled)
    used = [
        int(call.block_table[i, j])
        for i, n in enumerate(call.k_lens)
        for j in range(-(-n // call.page_size))
    ]
    assert sorted(used) == list(range(1, call.k_cache.shape[0]))
    assert call.block_table.dtype == call.seqused_k.dtype == call.cu_seqlens_q.dtype == torch.int32
    assert call.block_table[1].tolist()[1:] == [0, 0, 0], "entries that no key needs"


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_packed_keys_put_into_pages_read_back_as_they_were(page_size: int) -> None:
    sequences = [sequence(i, n) for i, n in enumerate((1, 16, 33, 64))]
    packed = pack(sequences, 0.5, [(0, 1), (0, 16), (30, 33), (10, 50)], padding=3)
    paged = to_pages(packed, page_size)
    assert (type(paged), paged.page_size) == (PagedPrefill, page_size)
    assert paged.q is packed.q and paged.cu_seqlens_q is packed.cu_seqlens_q
    assert (paged.q_lens, paged.k_lens) == (packed.q_lens, packed.k_lens)
    assert (paged.softmax_scale, paged.causal) == (packed.softmax_scale, packed.causal)
    start = 0
    for i, n in enumerate(packed.k_lens):
        assert torch.equal(read_back(paged, i, paged.k_cache), packed.k[start : start + n])
        assert torch.equal(read_back(paged, i, paged.v_cache), packed.v[start : start + n])
        start += n


def unused(call: PagedPrefill) -> torch.Tensor:
    """[blocks, page_size], true for the slots that no key uses."""
    free = torch.ones(call.k_cache.shape[:2], dtype=torch.bool)
    for i, n in enumerate(call.k_lens):
        for j in range(n):
            free[int(call.block_table[i, j // call.page_size]), j % call.page_size] = False
    return free


def test_unused_slots_hold_finite_junk_that_differs_with_the_junk_number() -> None:
    one = [sequence(0, 37), sequence(1, 5)]
    spans = [(36, 37), (4, 5)]
    a = page(one, spans, 1.0, page_size=16, decode=True)
    b = page(one, spans, 1.0, page_size=16, decode=True, junk=77)
    free = unused(a)
    assert int(free.sum()) == 16 * 5 - 42
    for name in ("k_cache", "v_cache"):
        x, y = getattr(a, name), getattr(b, name)
        assert bool(torch.isfinite(x).all()) and bool(torch.isfinite(y).all())
        assert torch.equal(x[~free], y[~free])
        differ = (x[free] != y[free]).flatten(1).any(1)
        assert bool(differ.all()), "every unused slot holds something else"
        assert float(x[free].float().std()) > 0.5
    assert digest(a.k_cache[0]) != digest(a.v_cache[0])
    assert torch.equal(a.block_table, b.block_table)


def test_unused_slots_can_hold_nan_and_used_ones_never_do() -> None:
    one, spans = [sequence(0, 37), sequence(1, 5)], [(36, 37), (4, 5)]
    usual = page(one, spans, 1.0, page_size=16, decode=True)
    stale = page(one, spans, 1.0, page_size=16, decode=True, junk=None)
    free = unused(stale)
    for name in ("k_cache", "v_cache"):
        x, y = getattr(usual, name), getattr(stale, name)
        assert torch.equal(x[~free], y[~free])
        assert bool(y[free].isnan().all())


@pytest.mark.parametrize("pages", range(1, 201))
def test_page_order_is_a_permutation(pages: int) -> None:
    ascending, shuffled = page_order(pages, False), page_order(pages, True)
    assert ascending == list(range(1, pages + 1))
    assert sorted(shuffled) == ascending


@pytest.mark.parametrize("pages", range(3, 201))
def test_shuffled_order_is_no_ascending_run(pages: int) -> None:
    order = page_order(pages, True)
    assert order != page_order(pages, False)
    neighbours = sum(b == a + 1 for a, b in itertools.pairwise(order))
    assert neighbours <= 1 or pages < 5


def test_decode_call_is_of_its_own_kind() -> None:
    one = [sequence(0, 9)]
    assert type(page(one, [(8, 9)], 1.0, page_size=4, decode=True)) is PagedDecode
    assert type(page(one, [(8, 9)], 1.0, page_size=4)) is PagedPrefill
    assert (PagedDecode.entry, PagedPrefill.entry, PackedPrefill.entry) == (
        "decode",
        "paged-prefill",
        "prefill",
    )


def test_packed_sequences_stand_one_after_another() -> None:
    sequences = [sequence(0, 3), sequence(1, 1), sequence(2, 7)]
    call = pack(sequences, 0.25)
    assert call.cu_seqlens_q.tolist() == call.cu_seqlens_k.tolist() == [0, 3, 4, 11]
    assert (call.q_lens, call.k_lens) == ((3, 1, 7), (3, 1, 7))
    assert (call.max_seqlen_q, call.max_seqlen_k, call.softmax_scale) == (7, 7, 0.25)
    assert call.causal
    for name in ("q", "k", "v"):
        expected = torch.cat([s.whole(name) for s in sequences])
        assert torch.equal(getattr(call, name), expected)


def test_spans_cut_the_queries_and_keep_the_keys_before() -> None:
    sequences = [sequence(0, 10), sequence(1, 20)]
    call = pack(sequences, 1.0, [(9, 10), (4, 8)])
    assert (call.q_lens, call.k_lens) == ((1, 4), (10, 8))
    assert call.cu_seqlens_q.tolist() == [0, 1, 5]
    assert call.cu_seqlens_k.tolist() == [0, 10, 18]
    assert torch.equal(
        call.q, torch.cat([sequences[0].whole("q")[9:], sequences[1].whole("q")[4:8]])
    )
    assert torch.equal(call.v, torch.cat([sequences[0].whole("v"), sequences[1].whole("v")[:8]]))


def test_padding_adds_rows_that_no_sequence_owns() -> None:
    one = sequence(0, 5)
    call = pack([one], 1.0, padding=3)
    assert call.q.shape[0] == 8
    assert call.k.shape[0] == 5
    assert call.cu_seqlens_q.tolist() == [0, 5]
    assert torch.equal(call.q[:5], one.whole("q"))


def test_backward_has_the_gradients_of_the_outputs_beside_the_queries() -> None:
    sequences = [sequence(0, 3), sequence(1, 4)]
    call = pack_backward(sequences, 1.0)
    assert torch.equal(call.dout, torch.cat([s.whole("dout") for s in sequences]))
    assert call.dout.shape == call.q.shape
    assert call.entry == "backward"


def test_rows_take_the_same_rows_of_every_output() -> None:
    outputs = {"a": torch.arange(6), "b": torch.arange(12).view(6, 2)}
    taken = rows(2, 4)(outputs)
    assert taken["a"].tolist() == [2, 3]
    assert taken["b"].tolist() == [[4, 5], [6, 7]]
    assert rows(4)(outputs)["a"].tolist() == [4, 5]


def test_offsets_are_int32() -> None:
    offsets = cumulative([3, 0, 2], torch.device("cpu"))
    assert offsets.tolist() == [0, 3, 3, 5]
    assert offsets.dtype == torch.int32


# --- dense batches ------------------------------------------------------------------------------


def test_groups_are_sequences_of_the_same_lengths_in_order() -> None:
    found = groups((3, 1, 3, 3, 1), (3, 9, 3, 5, 9))
    assert [(g.q_len, g.k_len, g.members) for g in found] == [
        (3, 3, (0, 2)),
        (1, 9, (1, 4)),
        (3, 5, (3,)),
    ]
    assert found[0].q_starts == (0, 4)
    assert found[0].k_starts == (0, 12)
    assert found[1].q_starts == (3, 10)
    assert found[1].k_starts == (3, 20)


def test_gather_makes_heads_the_outer_dimension() -> None:
    packed = torch.arange(5 * 2 * 3).view(5, 2, 3)
    found = gather(packed, (0, 3), 2)
    assert found.shape == (2, 2, 2, 3)
    assert torch.equal(found[1, 0, 1], packed[4, 0])


def test_dense_results_go_back_to_their_rows_and_padding_stays_zero() -> None:
    sequences = [sequence(i, n) for i, n in enumerate((4, 2, 4, 1, 2))]
    call = pack(sequences, 1.0, padding=3)
    batches: list[int] = []

    def echo(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batches.append(q.shape[0])
        assert k.shape[:2] == (q.shape[0], 1) and v.shape == k.shape
        return q

    out = attend_packed(call, call.q, call.k, call.v, echo)
    assert torch.equal(out[:13], call.q[:13])
    assert out[13:].tolist() == torch.zeros(3, 2, 4).tolist()
    assert batches == [2, 2, 1]


def test_equally_long_sequences_are_handed_over_without_a_copy() -> None:
    call = pack([sequence(i, 4) for i in range(3)], 1.0)

    def echo(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert q.shape == (3, 2, 4, 4)
        assert q.data_ptr() == call.q.data_ptr()
        assert v.data_ptr() == call.v.data_ptr()
        return q

    assert torch.equal(attend_packed(call, call.q, call.k, call.v, echo), call.q)
