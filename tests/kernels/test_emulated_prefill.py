"""The kernel of prefills on the CPU: the generic kernel's bits, however it is scheduled."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core to plan: pip install 'rlbench[kernels]'")

from emulation.builds import (
    EAGER,
    LAZY,
    LAZY_SHUFFLED,
    SHUFFLED,
    Edit,
    Schedule,
    skip_where_it_cannot_run,
)
from emulation.launches import (
    assert_noticed,
    generic_plan,
    generic_result,
    prefill_plan,
    prefill_plan_on,
    run,
)
from emulation.problems import (
    Case,
    Problem,
    Result,
    assert_close,
    assert_same_bits,
    problem_of,
    reference,
)

from rlbench.kernels.attention import prefill, tensor_map, tiles
from rlbench.kernels.attention.request import BLOCK_KEYS, split_keys

skip_where_it_cannot_run()


def case(
    head_dim: int,
    dtype: torch.dtype,
    page_size: int | None,
    heads: int,
    kv_heads: int,
    *,
    causal: bool,
) -> Case:
    """Whole prefills and chunks: no keys, fewer keys than queries, edges of blocks, three splits."""
    block, split = BLOCK_KEYS[head_dim], split_keys(head_dim)
    lengths = (
        *((1, 1), (3, 0), (40, 10), (7, 2 * block), (30, 2 * block + 1)),
        *((2, split + 1), (3, 2 * split + block)),
    )
    return Case(head_dim, dtype, page_size, heads, kv_heads, lengths, causal)


CASES = [
    case(64, torch.float16, None, 10, 1, causal=True),
    case(64, torch.bfloat16, 16, 5, 1, causal=False),
    case(128, torch.bfloat16, None, 4, 2, causal=True),
    case(128, torch.float16, 7, 10, 1, causal=False),
    case(256, torch.bfloat16, None, 5, 1, causal=False),
    case(256, torch.bfloat16, 16, 8, 1, causal=True),
]
SMALL = CASES[1]._replace(lengths=((30, 300), (30, 200), (30, 30)), causal=True)
Q_BY_TMA = SMALL._replace(head_dim=128, heads=4, page_size=None)
PACKED = [case for case in CASES if case.page_size is None]
# Clusters' second tiles are there, absent, or see a block more than the first.
SHARING = [
    case(128, torch.bfloat16, None, 8, 2, causal=True),
    case(256, torch.float16, None, 16, 2, causal=True),
]
SHARING = [case._replace(lengths=((70, 150), *case.lengths)) for case in SHARING]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def before_poison(case: Case, *, causal: bool) -> tuple[Problem, slice, Result]:
    """Three sequences whose keys end within blocks, NaN and infinity for the keys of the second; the
    rows of the first; and what they have to be."""
    block = BLOCK_KEYS[case.head_dim]
    first, second = (40, 2 * block + 3), (9, block + 1)
    problem = problem_of(case._replace(lengths=(first, second, (2, 5)), causal=causal))
    clean = slice(first[0])
    want = only(clean, generic_result(problem.case))
    return problem.poisoned(first[1], first[1] + second[1]), clean, want


def only(rows: slice, result: Result) -> Result:
    return Result(result.out[rows], result.lse[rows])


@each_case
def test_generic_kernel_is_near_fp64(case: Case) -> None:
    assert_close(generic_result(case), reference(problem_of(case)))


@each_case
@pytest.mark.parametrize(("blocks", "schedule"), [(1, LAZY_SHUFFLED), (3, SHUFFLED)], ids=str)
def test_prefill_kernel_has_the_generic_kernels_bits(
    case: Case, blocks: int, schedule: Schedule
) -> None:
    problem = problem_of(case)
    result = run(problem, prefill_plan(problem, blocks), schedule)
    assert_same_bits(result, generic_result(case))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize(("blocks", "schedule"), [(1, LAZY_SHUFFLED), (3, SHUFFLED)], ids=str)
def test_prefill_kernel_has_them_with_tma_too(
    case: Case, causal: bool, blocks: int, schedule: Schedule
) -> None:
    problem = problem_of(case._replace(causal=causal))
    result = run(problem, prefill_plan(problem, blocks, tma=True), schedule)
    assert_same_bits(result, generic_result(problem.case))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("case", SHARING, ids=str)
@pytest.mark.parametrize(
    ("blocks", "schedule"), [(2, LAZY_SHUFFLED), (4, SHUFFLED), (4, LAZY)], ids=str
)
def test_clusters_that_share_keys_have_them_too(
    case: Case, causal: bool, blocks: int, schedule: Schedule
) -> None:
    problem = problem_of(case._replace(causal=causal))
    result = run(problem, prefill_plan(problem, blocks, tma=True, ranks=2), schedule)
    assert_same_bits(result, generic_result(problem.case))


@pytest.mark.parametrize(
    ("old", "new", "schedule"),
    [
        ("return end > other ? end : other;", "return end;", EAGER),
        ("} else if (lane < kRanks) {", "} else if (lane == rank) {", EAGER),
        ("static_cast<int>(rank) * kOwnPanels", "0", EAGER),
        ("turn.stage * kStageBytes + rank * kOwn", "turn.stage * kStageBytes + 0 * kOwn", EAGER),
        # In orders in which threads come to the others' memory too late, or too early.
        ("    cluster_end();\n    cluster_wait_for_others();\n", "", Schedule(lazy=True, seed=1)),
        (
            "    cluster_begin();\n    cluster_wait_for_others();\n  }",
            "    __syncthreads();\n  }",
            Schedule(seed=78),
        ),
    ],
)
def test_what_is_wrong_with_a_cluster_is_noticed(old: str, new: str, schedule: Schedule) -> None:
    problem = problem_of(Q_BY_TMA._replace(lengths=((70, 300), (30, 200), (20, 30))))
    edit = Edit("attention_prefill_sm90.cu", old, new)
    assert_noticed(problem, prefill_plan(problem, 2, tma=True, ranks=2), schedule, edit)


@pytest.mark.parametrize("case", PACKED, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_tma_gives_zeros_for_the_next_sequence(case: Case, causal: bool) -> None:
    problem, clean, want = before_poison(case, causal=causal)
    result = run(problem, prefill_plan(problem, 2, tma=True), LAZY_SHUFFLED)
    assert_same_bits(only(clean, result), want)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_thread_block_for_each_tile_has_these_bits_too(case: Case) -> None:
    problem = problem_of(case)
    assert_same_bits(run(problem, prefill_plan(problem), LAZY), generic_result(case))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("schedule", [EAGER, LAZY, LAZY_SHUFFLED], ids=str)
def test_even_sequences_have_these_bits_too(
    causal: bool, page_size: int | None, schedule: Schedule
) -> None:
    problem = problem_of(SMALL._replace(causal=causal, page_size=page_size))
    plan = prefill_plan_on(problem, sms=2)
    assert bool(plan.launches[0].maps) == (page_size is None)
    assert plan.launches[0].config.grid[0] == 2  # of the 6 tiles
    assert_same_bits(run(problem, plan, schedule), generic_result(problem.case))


@pytest.mark.parametrize("pairs", [1, 2, 4])
@pytest.mark.parametrize("page_size", [None, 16])
def test_tiles_may_come_in_sections(page_size: int | None, pairs: int) -> None:
    """Of so many of the six KV heads of sequences."""
    lengths = ((150, 150),) * 3
    problem = problem_of(Case(128, torch.bfloat16, page_size, 4, 2, lengths))
    keys = 150 if page_size is None else split_keys(128)
    with mock.patch.object(tiles, "_L2_BYTES", pairs * keys * 128 * 4 + 1):
        assert prefill.section(problem.request) == pairs
        plan = prefill_plan_on(problem, sms=4)
    assert_same_bits(run(problem, plan, LAZY), generic_result(problem.case))


@pytest.mark.parametrize(
    ("head_dim", "page_size", "group", "by_tma"),
    [
        *((64, None, group, True) for group in (1, 2, 3, 16)),  # of tiles of 192 rows
        *((128, None, group, group not in (3, 5)) for group in (1, 2, 3, 4, 5, 8)),
        *((64, 16, 3, False), (64, 16, 16, True), (256, None, 8, True), (256, 16, 4, True)),
    ],
)
@pytest.mark.parametrize("schedule", [EAGER, LAZY_SHUFFLED], ids=str)
def test_q_comes_by_tma_where_tiles_are_whole_positions(
    head_dim: int, page_size: int | None, group: int, by_tma: bool, schedule: Schedule
) -> None:
    # Tiles end inside of sequences, at their ends and behind them, and behind the last one is nothing.
    lengths = ((150, 150), (4, 0), (1, 90), (128 // group, 200), (33, 40))
    problem = problem_of(
        Case(head_dim, torch.bfloat16, page_size, 2 * group, 2, lengths, causal=True)
    )
    plan = prefill_plan(problem, 3, tma=True)
    assert (tensor_map.Q in [it.pointer for it in plan.launches[0].maps]) == by_tma
    assert_same_bits(run(problem, plan, schedule), generic_result(problem.case))


def test_q_is_a_part_of_a_larger_tensor() -> None:
    problem = problem_of(Q_BY_TMA)
    rows, heads, head_dim = problem.request.q.shape
    q = torch.full((rows, heads + 4, head_dim), math.nan, dtype=torch.bfloat16)[:, :heads]
    q.copy_(problem.request.q)
    part = replace(problem, request=replace(problem.request, q=q))
    plan = prefill_plan(part, 2, tma=True)
    assert len(plan.launches[0].maps) == 3
    assert_same_bits(run(part, plan, LAZY_SHUFFLED), generic_result(Q_BY_TMA))


def test_the_next_sequences_queries_do_not_matter() -> None:
    problem = problem_of(Q_BY_TMA)
    first = slice(Q_BY_TMA.lengths[0][0])
    q = problem.request.q.clone(memory_format=torch.preserve_format)
    q[first.stop :] = math.nan
    poisoned = replace(problem, request=replace(problem.request, q=q))
    result = run(poisoned, prefill_plan(poisoned, 2, tma=True), LAZY_SHUFFLED)
    assert_same_bits(only(first, result), only(first, generic_result(Q_BY_TMA)))


@pytest.mark.parametrize("page_size", [None, 16])
def test_more_keys_than_promised_are_nan(page_size: int | None) -> None:
    split = split_keys(64)
    lengths = ((2, split), (2, split + 1), (2, 40))
    problem = problem_of(SMALL._replace(lengths=lengths, page_size=page_size))
    promised = problem.promised(splits=1)
    whole = generic_result(problem.case)
    for plan in (generic_plan(promised), prefill_plan(promised), prefill_plan(promised, tma=True)):
        result = run(promised, plan, LAZY)
        assert result.out[3].isnan().all()  # the row before it may be, too
        assert result.lse[3].isnan().all()
        for rows in (slice(2), slice(4, None)):
            assert_same_bits(only(rows, result), only(rows, whole))


# What is below would not be noticed by an emulator that notices nothing.


AWAIT_Q = "if (earlier_tiles > 0) named_barrier(kFreeQ, kConsumerThreads + kTileThreads);"
SMALL_PACKED = SMALL._replace(page_size=None)
TWO_SPLITS = Q_BY_TMA._replace(
    lengths=((2, split_keys(Q_BY_TMA.head_dim) + 1), (3, split_keys(Q_BY_TMA.head_dim) + 200))
)


@pytest.mark.parametrize(
    ("wait", "schedule"),
    [
        (AWAIT_Q + "\n", EAGER),
        ("wgmma_wait<1>();\n      end_scores", LAZY),
        ("wgmma_wait<1>();\n      end_values", LAZY),
        ("wgmma_wait<0>();\n      end_scores(next", LAZY),
    ],
)
def test_a_missing_wait_is_noticed(wait: str, schedule: Schedule) -> None:
    problem = problem_of(SMALL)
    edit = Edit("attention_prefill_sm90.cu", wait, wait.partition(";\n")[2])
    assert_noticed(problem, prefill_plan(problem, 1), schedule, edit)


@pytest.mark.parametrize(
    ("case", "old", "new", "schedule"),
    [
        # Q by cp.async.
        (SMALL_PACKED, AWAIT_Q, "", EAGER),
        (SMALL_PACKED, "mbarrier_sleep(barrier(kFullV, before.stage), before.parity);", "", LAZY),
        (SMALL_PACKED, "mbarrier_sleep(barrier(kFullV, turn.stage), turn.parity);", "", LAZY),
        (SMALL_PACKED, "await_free(barrier(empty, turn.stage), turn.parity ^ 1);", "", EAGER),
        (SMALL_PACKED, "_arrive_expecting(barrier(full", "_arrive_expecting(barrier(empty", LAZY),
        (SMALL_PACKED, "turn.stage), kStageBytes);", "turn.stage), kStageBytes / 2);", EAGER),
        (SMALL_PACKED, "copy_async_wait_all();\n        fence", "fence", LAZY),
        # Q by TMA; K is looked for ahead of time.
        (Q_BY_TMA, AWAIT_Q, "", EAGER),
        (Q_BY_TMA, "mbarrier_sleep(full_q, tile % 2);", "", LAZY),
        (Q_BY_TMA, "mbarrier_expect(full_q, kPanels * kQPanel);", "", LAZY),
        (Q_BY_TMA, "kPanels * kQPanel);", "kQPanel);", EAGER),
        (Q_BY_TMA, "if (tile_thread == 0) rows.note(note, blocks);", "", EAGER),
        (Q_BY_TMA, "Note& note = notes[earlier_tiles % 2];", "Note& note = notes[0];", EAGER),
        (Q_BY_TMA, "there = mbarrier_is_over(", "there = next.stage < kStages || (", LAZY_SHUFFLED),
        # A split leaves late.
        (TWO_SPLITS, "end_split(ended, blocks - 1 == kSplitBlocks);", "{}", EAGER),
        (TWO_SPLITS, "if (splits) rescale[0] = rescale[1] = 1.0f;", "", EAGER),
        (TWO_SPLITS, "leaves = kLeavesLate && place == 0 && block > 1;", "leaves = false;", EAGER),
    ],
)
def test_what_is_wrong_with_tma_is_noticed(
    case: Case, old: str, new: str, schedule: Schedule
) -> None:
    problem = problem_of(case)
    edit = Edit("attention_prefill_sm90.cu", old, new)
    assert_noticed(problem, prefill_plan(problem, 1, tma=True), schedule, edit)


def test_a_box_that_reaches_into_the_next_sequence_is_noticed() -> None:
    problem, clean, want = before_poison(PACKED[0], causal=False)
    rows = "const int end = end_at(deal.place, rows);\n"
    edit = Edit("attention_prefill_sm90.cu", rows, rows.replace(";", " + (rows.k_begin == 0);"))
    with pytest.raises(AssertionError, match="that differ"):
        assert_same_bits(
            only(clean, run(problem, prefill_plan(problem, 2, tma=True), LAZY, edit)), want
        )


def test_a_stage_that_is_not_released_is_a_deadlock() -> None:
    last = "if (block == blocks - 1) named_barrier_arrive(kFreeQ,"
    edit = Edit("attention_prefill_sm90.cu", last, last.replace("block == blocks - 1", "block > 0"))
    problem = problem_of(SMALL._replace(lengths=((2, 5), (2, 5))))
    with pytest.raises(
        AssertionError, match=r"deadlock:\n  block 0, threads 0 to 127: .*named_barrier"
    ):
        run(problem, prefill_plan(problem, 1), EAGER, edit)
