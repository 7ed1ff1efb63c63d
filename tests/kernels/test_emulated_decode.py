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
from emulation.launches import decode_plan, generic_result, run, stream_plan
from emulation.problems import (
    Case,
    Problem,
    Result,
    assert_close,
    assert_same_bits,
    problem_of,
    reference,
)

from rlbench.kernels.attention import decode, stream
from rlbench.kernels.attention.launch import Plan
from rlbench.kernels.attention.request import BLOCK_KEYS, split_keys

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
SMALL = CASES[1]._replace(lengths=((1, 300), (1, 1000)))
PLANS: dict[str, Callable[[Problem], Plan]] = {
    "stream-splits": functools.partial(stream_plan, whole=False),
    "stream-whole": functools.partial(stream_plan, whole=True),
    "stream-splits-tma": functools.partial(stream_plan, whole=False, tma=True),
    "stream-whole-tma": functools.partial(stream_plan, whole=True, tma=True),
    **{f"{ranks}-ranks": functools.partial(decode_plan, ranks=ranks) for ranks in decode.RANKS},
}
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_plan = pytest.mark.parametrize("plan", PLANS)


@each_case
def test_generic_kernel_is_near_fp64(case: Case) -> None:
    assert_close(generic_result(case), reference(problem_of(case)))


@each_case
@each_plan
def test_decode_kernels_have_the_generic_kernels_bits(case: Case, plan: str) -> None:
    problem = problem_of(case)
    schedule = SHUFFLED if case.page_size else LAZY_SHUFFLED
    assert_same_bits(run(problem, PLANS[plan](problem), schedule), generic_result(case))


@each_plan
@pytest.mark.parametrize("schedule", [EAGER, SHUFFLED, LAZY, LAZY_SHUFFLED], ids=str)
def test_decode_kernels_have_these_bits_in_other_schedules(plan: str, schedule: Schedule) -> None:
    problem = problem_of(SMALL)
    assert_same_bits(run(problem, PLANS[plan](problem), schedule), generic_result(SMALL))


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


def test_pages_beyond_32_bits_of_chunks_are_not_streamed() -> None:
    request = problem_of(SMALL).request
    pages, *others = request.k.shape
    strides = (2**35 // (pages - 1), *request.k.stride()[1:])
    far = torch.empty_strided((pages, *others), strides, dtype=request.k.dtype, device="meta")
    with mock.patch.object(stream, "fits", return_value=True):
        assert stream.serves(request)
        assert not stream.serves(replace(request, v=far))


# What is below would not be noticed by an emulator that notices nothing.


def test_a_copy_that_is_not_waited_for_is_noticed() -> None:
    edit = Edit("attention_stream_sm90.cu", "copy_async_wait<kStages - 1>();", "")
    problem = problem_of(SMALL)
    result = run(problem, stream_plan(problem, whole=True), LAZY, edit)
    with pytest.raises(AssertionError, match="that differ"):
        assert_same_bits(result, generic_result(SMALL))


def test_a_barrier_that_a_warp_skips_is_a_deadlock() -> None:
    edit = Edit(
        "attention_stream_sm90.cu",
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
