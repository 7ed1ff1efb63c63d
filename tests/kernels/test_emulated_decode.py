"""The kernels of decode steps on the CPU: the generic kernel's bits, however they are scheduled."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from emulation.launches import assert_noticed, decode_plan, generic_result, run, stream_plan
from emulation.problems import (
    Case,
    Problem,
    Result,
    assert_close,
    assert_same_bits,
    problem_of,
    reference,
)

from rlbench.kernels.attention import decode, divisors, stream, tensor_map
from rlbench.kernels.attention.launch import Plan
from rlbench.kernels.attention.request import BLOCK_KEYS, Request, split_keys

skip_where_it_cannot_run()


def case(
    head_dim: int, dtype: torch.dtype, page_size: int | None, heads: int, kv_heads: int
) -> Case:
    """One query for each of: no key, some keys, and what lies at the edges of blocks and splits."""
    block, split = BLOCK_KEYS[head_dim], split_keys(head_dim)
    keys = (1, 0, block, block + 1, 300, split, split + 1, 2 * split + 17)
    return Case(head_dim, dtype, page_size, heads, kv_heads, tuple((1, n) for n in keys))


CASES = [
    case(64, torch.float16, None, 10, 1),
    case(64, torch.bfloat16, 16, 5, 1),
    case(128, torch.bfloat16, None, 8, 2),
    case(128, torch.float16, 7, 10, 1),
    case(256, torch.bfloat16, None, 5, 1),
    case(256, torch.bfloat16, 16, 8, 1),
    case(128, torch.bfloat16, 32, 8, 2),
    case(64, torch.float16, 128, 8, 1),
]
STREAM, BOXES = "attention_stream_sm90.cu", "key_boxes.cuh"
SMALL = CASES[1]._replace(lengths=((1, 300), (1, 1000)))
PLANS: dict[str, Callable[[Problem], Plan]] = {
    "stream-splits": functools.partial(stream_plan, whole=False),
    "stream-whole": functools.partial(stream_plan, whole=True),
    "stream-splits-tma": functools.partial(stream_plan, whole=False, tma=True),
    "stream-whole-tma": functools.partial(stream_plan, whole=True, tma=True),
    **{f"{ranks}-ranks": functools.partial(decode_plan, ranks=ranks) for ranks in decode.RANKS},
}
# Edges of boxes, and pages that are looked up later than at first.
EDGES = (15, 16, 17, 63, 64, 65, 79, 81, 112, 127, 129, 144, 2239, 2303, 2320, 6500)
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_plan = pytest.mark.parametrize("plan", PLANS)


@each_case
def test_generic_kernel_is_near_fp64(case: Case) -> None:
    assert_close(generic_result(case), reference(problem_of(case)))


@pytest.mark.parametrize(
    ("plan", "case"),
    # TMA brings 16 keys of a page.
    [(p, c) for p in PLANS for c in CASES if "ranks" not in p or (c.page_size or 16) % 16 == 0],
    ids=str,
)
def test_decode_kernels_have_the_generic_kernels_bits(plan: str, case: Case) -> None:
    problem = problem_of(case)
    schedule = SHUFFLED if case.page_size else LAZY_SHUFFLED
    assert_same_bits(run(problem, PLANS[plan](problem), schedule), generic_result(case))


@each_plan
@pytest.mark.parametrize("schedule", [EAGER, SHUFFLED, LAZY, LAZY_SHUFFLED], ids=str)
def test_decode_kernels_have_these_bits_in_other_schedules(plan: str, schedule: Schedule) -> None:
    problem = problem_of(SMALL)
    assert_same_bits(run(problem, PLANS[plan](problem), schedule), generic_result(SMALL))


@each_plan
@pytest.mark.parametrize("head_dim", BLOCK_KEYS)
@pytest.mark.parametrize("schedule", [LAZY, LAZY_SHUFFLED], ids=str)
def test_the_next_sequence_may_hold_anything(schedule: Schedule, head_dim: int, plan: str) -> None:
    problem, want = before_poison(head_dim)
    result = run(problem, PLANS[plan](problem), schedule)
    assert_same_bits(Result(result.out[:1], result.lse[:1]), want)


@each_plan
def test_more_keys_than_promised_are_nan(plan: str) -> None:
    split = split_keys(64)
    problem = problem_of(CASES[1]._replace(lengths=((1, split), (1, split + 1), (1, 5))))
    whole, result = generic_result(problem.case), run_promised(problem, plan)
    for b, is_impossible in enumerate((False, True, False)):
        if is_impossible:
            assert result.out[b].isnan().all()
            assert result.lse[b].isnan().all()
        else:
            assert_same_bits(
                Result(result.out[b], result.lse[b]), Result(whole.out[b], whole.lse[b])
            )


def run_promised(problem: Problem, plan: str) -> Result:
    promised = problem.promised(splits=1)
    return run(promised, PLANS[plan](promised), LAZY)


def streamed(
    problem: Problem, *, whole: bool, schedule: Schedule, edit: Edit | None = None
) -> Result:
    """By TMA."""
    plan = stream_plan(problem, whole=whole, tma=True)
    assert plan.launches[0].maps
    return run(problem, plan, schedule, edit)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("head_dim", BLOCK_KEYS)
@pytest.mark.parametrize("page_size", [None, 16, 32, 48])
def test_boxes_may_end_anywhere(head_dim: int, page_size: int | None, whole: bool) -> None:
    lengths = tuple((1, n) for n in EDGES)
    problem = problem_of(Case(head_dim, torch.bfloat16, page_size, 3, 1, lengths))
    result = streamed(problem, whole=whole, schedule=LAZY_SHUFFLED)
    assert_same_bits(result, generic_result(problem.case))


def before_poison(head_dim: int) -> tuple[Problem, Result]:
    """Packed keys that end within a block, NaN and infinity after them; and the one result."""
    first = BLOCK_KEYS[head_dim] + 37
    problem = problem_of(Case(head_dim, torch.bfloat16, None, 4, 2, ((1, first), (1, 500))))
    want = generic_result(problem.case)
    return problem.poisoned(first), Result(want.out[:1], want.lse[:1])


@pytest.mark.parametrize("whole", [True, False])
def test_tma_copies_pages_with_other_strides(whole: bool) -> None:
    """K with the heads first in a page, V from a pool of both."""
    problem = problem_of(CASES[3]._replace(page_size=16, heads=6, kv_heads=2))
    k, v = problem.request.k, problem.request.v
    heads_first = k.transpose(1, 2).contiguous().transpose(1, 2)
    from_both = torch.stack((v, torch.full_like(v, float("nan"))), 1)[:, 0]
    request = replace(problem.request, k=heads_first, v=from_both)
    result = streamed(replace(problem, request=request), whole=whole, schedule=SHUFFLED)
    assert_same_bits(result, generic_result(problem.case))


@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 24, 128])
def test_clusters_serve_what_tma_can_bring(
    page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = problem_of(Case(128, torch.bfloat16, page_size, 8, 1, ((1, 300),))).request
    with (
        mock.patch.object(decode, "fits", return_value=True),
        mock.patch.object(decode, "sms", return_value=132),
        mock.patch.object(decode, "clusters_at_once", return_value=30),
    ):
        assert decode.serves(request) is (page_size in (None, 16, 128))
        assert not decode.serves(replace(request, splits=34))
        assert not decode.serves(replace(request, max_seqlen_q=2))
        monkeypatch.setenv(tensor_map.SWITCH, "0")
        assert not decode.serves(request)


def test_pages_beyond_32_bits_of_chunks_are_streamed_by_tma_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = problem_of(SMALL).request
    pages, *others = request.k.shape
    row = request.k.stride(1)

    def far(page_stride: int) -> Request:
        strides = (page_stride, *request.k.stride()[1:])
        v = torch.empty_strided((pages, *others), strides, dtype=request.k.dtype, device="meta")
        return replace(request, v=v)

    beyond = 2**35 // (pages - 1)
    of_rows = -(-beyond // row) * row
    with (
        mock.patch.object(stream, "fits", return_value=True),
        mock.patch.object(stream, "sms", return_value=132),
    ):
        assert stream.serves(request)
        assert stream.serves(far(of_rows))
        assert not stream.serves(far(of_rows + 8))
        monkeypatch.setenv(tensor_map.SWITCH, "0")
        assert stream.serves(request)
        assert not stream.serves(far(of_rows))


@pytest.mark.parametrize(
    ("head_dim", "sequences", "whole", "tma"),
    [
        (256, 8, False, True),
        (128, 60, True, False),  # a thread block for nearly every SM
        (64, 60, True, True),
        (64, 70, False, True),  # for some SMs two, for most of them one
        (256, 2000, True, False),
        (64, 2000, True, False),
    ],
)
def test_memory_bound_steps_are_copied_whole(
    head_dim: int, sequences: int, whole: bool, tma: bool
) -> None:
    shape = (1, 16, 2, head_dim)
    keys = torch.empty(shape, dtype=torch.bfloat16, device="meta").expand(50_000, *shape[1:])
    template = problem_of(SMALL).request
    request = replace(
        template, q=template.q.new_empty(sequences, 8, head_dim), k=keys, v=keys,
        sequences=sequences, splits=4,
    )  # fmt: skip
    with mock.patch.object(stream, "sms", return_value=132):
        assert stream.takes_whole(request) is whole
        assert stream._build_of(request)[0].tma is tma


@pytest.mark.parametrize("size", [1, 2, 3, 16, 48, 528, 2**20 + 16, 2**30, 2**30 + 1, 2**31 - 1])
def test_numbers_are_divided_without_a_division(size: int) -> None:
    encoded = divisors.divisor(size)
    factor, shift = encoded % 2**32, encoded >> 32
    most = 2**31 - 1
    for multiple in {0, size, 7 * size, most // 2 // size * size, most // size * size}:
        for key in (multiple - 1, multiple, multiple + size - 1, most):
            if 0 <= key <= most:
                assert (key * factor >> 32 >> shift if factor else key) == key // size


# What is below would not be noticed by an emulator that notices nothing.


def test_a_copy_that_is_not_waited_for_is_noticed() -> None:
    edit = Edit(STREAM, "copy_async_wait<kStages - 1>();", "")
    problem = problem_of(SMALL)
    result = run(problem, stream_plan(problem, whole=True), LAZY, edit)
    with pytest.raises(AssertionError, match="that differ"):
        assert_same_bits(result, generic_result(SMALL))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    ("file", "old", "new", "schedule"),
    [
        (STREAM, "if constexpr (kTma) mbarrier_wait(barrier, parity);", "", LAZY),
        (BOXES, "(k_asked + v_asked) * kBoxBytes);", "2 * kBoxBytes);", EAGER),
        (BOXES, "(k_asked + v_asked) * kBoxBytes);", "k_asked * kBoxBytes);", EAGER),
        (BOXES, "if (!v_asked) clear(v_tile + offset);", "", EAGER),  # NaN
        (BOXES, "    fence_async_proxy();\n", "", EAGER),
        (BOXES, "v_x(kBoxKeys)", "v_x(0)", EAGER),  # from before the tensor
        (BOXES, "const int x = past > 0 ? past : 0;", "const int x = 0;", EAGER),
        (BOXES, "v_x = x;", "v_x = 0;", EAGER),
        (BOXES, "const int past = key + kBoxKeys - end;", "const int past = key - end;", EAGER),
    ],
)
def test_what_is_wrong_with_tma_is_noticed(
    file: str, old: str, new: str, schedule: Schedule, page_size: int | None
) -> None:
    if page_size:
        problem, want = problem_of(SMALL), generic_result(SMALL)
    else:
        problem, want = before_poison(64)
    rows = slice(want.out.shape[0])

    def check() -> None:
        result = streamed(problem, whole=True, schedule=schedule, edit=Edit(file, old, new))
        assert_same_bits(Result(result.out[rows], result.lse[rows]), want)

    with pytest.raises(AssertionError, match=r"that differ|deadlock:|fault:"):
        check()


@pytest.mark.parametrize(
    "edit",
    [
        Edit(BOXES, "k_wanted && x < kBoxKeys", "k_wanted"),
        Edit(BOXES, "v_asked = v_x < kBoxKeys", "v_asked = true"),
    ],
)
def test_a_box_without_any_key_is_noticed(edit: Edit) -> None:
    with pytest.raises(AssertionError, match="a box wholly outside of its tensor"):
        streamed(problem_of(SMALL), whole=True, schedule=EAGER, edit=edit)


@pytest.mark.parametrize(
    ("old", "new", "schedule"),
    [
        ("    mbarrier_wait(barrier(kSaid), 0);\n    float", "    float", EAGER),
        ("        mbarrier_wait(barrier(full + stage), ", "        (void)(", LAZY),
        ("      mbarrier_wait(barrier(kThere + block), 0);\n      const", "      const", LAZY),
        ("      mbarrier_wait(barrier(kThere + block), 0);\n      sum", "      sum", EAGER),
        ("      mbarrier_wait(barrier(kEmptyValues + stage), ", "      (void)(", EAGER),
        ("  if (warp < kWorkers) named_barrier(kReferences, 32 * kWorkers);\n", "", EAGER),
        ("(rank < sums ? kTileSums : 0)", "0", EAGER),  # bytes that nobody waits for
        ("which < kThere ? 1 : 2;", "1;", SHUFFLED),  # V alone, or the weights
        ("mbarrier_arrive_expecting(barrier(kSaid), tiles * ", "(barrier(kSaid), tiles * ", EAGER),
        ("if (lane / 2 >= absent) {", "if (false) {", EAGER),  # NaN behind the last key
        ("+ e / 2 * 8 >= count) scores[e]", "+ e / 2 * 8 > count) scores[e]", EAGER),
    ],
)
def test_what_is_wrong_in_a_cluster_is_noticed(old: str, new: str, schedule: Schedule) -> None:
    problem = problem_of(Case(128, torch.bfloat16, 16, 8, 1, ((1, 300), (1, 2304), (1, 4600))))
    edit = Edit("attention_decode_sm90.cu", old, new)
    assert_noticed(problem, decode_plan(problem), schedule, edit)


def test_a_barrier_that_is_not_there_yet_is_noticed() -> None:
    edit = Edit(STREAM, "if (Keys::kBoxes > 1) __syncthreads();", "")
    with pytest.raises(AssertionError, match="there is no mbarrier"):
        streamed(problem_of(SMALL), whole=True, schedule=Schedule(seed=5), edit=edit)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lane) / 16 != step / 16 % 2", "lane) / 16 == step / 16 % 2"),  # what is still needed
        ("next_key += 32 * kBlockKeys;", "next_key += 16 * kBlockKeys;"),
    ],
)
def test_a_page_that_is_looked_up_in_the_wrong_place_is_noticed(old: str, new: str) -> None:
    problem = problem_of(SMALL._replace(lengths=((1, 6500),)))

    def check() -> None:
        result = streamed(problem, whole=True, schedule=EAGER, edit=Edit(BOXES, old, new))
        assert_same_bits(result, generic_result(problem.case))

    with pytest.raises(AssertionError, match=r"that differ|fault:"):
        check()


def test_a_barrier_that_a_warp_skips_is_a_deadlock() -> None:
    edit = Edit(
        STREAM,
        "copy_async_wait<kStages - 1>();\n    __syncthreads();",
        "copy_async_wait<kStages - 1>();\n    if (warp != 1) __syncthreads();",
    )
    problem = problem_of(SMALL)
    waiting = r"(?s)deadlock:.*block 0, threads 32 to 63: ended.*threads 64 to 255: .*__syncthreads"
    with pytest.raises(AssertionError, match=waiting):
        run(problem, stream_plan(problem, whole=True), EAGER, edit)


def test_a_key_of_no_page_is_noticed() -> None:
    problem = problem_of(SMALL)
    table = problem.request.block_table
    assert table is not None
    page = int(table[1, 3])
    table[1, 3] = table.max()  # of what no key needs
    try:
        with pytest.raises(AssertionError, match="a copy from outside of all tensors"):
            run(problem, stream_plan(problem, whole=True))
    finally:
        table[1, 3] = page
