"""The kernels of the backward on the CPU: right, and a function of the sequence alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple
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
    Shape,
    launch,
    program,
    raw_bytes,
    skip_where_it_cannot_run,
)
from emulation.launches import _gpu, generic_result
from emulation.problems import (
    NAN,
    Case,
    Problem,
    Result,
    bits,
    gapped,
    offsets,
    problem_of,
    reference,
)

from rlbench.kernels.attention import backward, tiles

skip_where_it_cannot_run()


class Gradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@dataclass(frozen=True)
class CpuBackward(backward.Backward):
    """A request whose tensors are on no device that there is a kernel for."""

    @property
    def device(self) -> int:
        return 0


CASES = [
    Case(64, torch.float16, None, 10, 1, ((1, 1), (3, 0), (0, 5), (40, 10), (7, 150), (30, 97))),
    Case(64, torch.bfloat16, None, 4, 4, ((65, 130), (64, 64)), causal=False),
    Case(128, torch.bfloat16, None, 4, 2, ((70, 70), (5, 130), (20, 3))),
    Case(256, torch.bfloat16, None, 5, 1, ((1, 1), (33, 40), (9, 100)), causal=False),
    Case(256, torch.float16, None, 8, 1, ((50, 50), (20, 90))),
    Case(64, torch.float16, None, 4, 2, ((300, 320),)),  # more blocks of rows than stages
]
SMALL = CASES[2]._replace(lengths=((40, 70), (20, 30)))
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@functools.cache
def dout_of(case: Case) -> torch.Tensor:
    """In poisoned memory, as the problem's tensors are."""
    problem = problem_of(case)
    generator = torch.Generator().manual_seed(len(case.lengths))
    dout = gapped(problem.request.q.shape, case.dtype, 16)
    dout.copy_(torch.randn(dout.shape, generator=generator))
    return dout


def run(
    problem: Problem,
    schedule: Schedule = EAGER,
    *,
    tile: int = 64,
    hopper: bool = False,
    sms: int = 1,
    edit: Edit | None = None,
    forward: Result | None = None,
    dout: torch.Tensor | None = None,
) -> Gradients:
    """What the real plan's launches make of it, into memory full of NaN."""
    request, case = problem.request, problem.case
    forward = forward or generic_result(case)
    templates = ((request.q, 8), (request.k, 16), (request.v, 24))
    got = Gradients(*(gapped(tensor.shape, case.dtype, gap) for tensor, gap in templates))
    dout = dout_of(case) if dout is None else dout
    tensors = request.q, request.k, request.v, forward.out, dout, *got
    sizes = len(case.lengths), request.max_seqlen_q, case.causal, request.softmax_scale
    with (
        _gpu(sms),
        mock.patch.object(backward, "_fitting", lambda build, _: replace(build, tile=tile)),
        mock.patch.object(backward, "fits", return_value=hopper),
    ):
        plan = backward.plan(CpuBackward(*tensors, *sizes))
    delta = torch.full((plan.work,), NAN)
    given = (
        *(request.q, request.k, request.v, forward.out, forward.lse, dout, *got, delta),
        *(problem.cu_seqlens_q, problem.lengths_k),
    )
    assert given[plan.work_at] is delta
    assert all(bool(launch.maps) == hopper for launch in plan.launches)
    for config, build, numbers, maps in plan.launches:
        ranks = getattr(build, "ranks", 1)
        shape = Shape(config.grid[0], config.block[0], ranks, config.shmem_size)
        its_edit = edit if edit and edit.file == f"{build.source.split('/')[1]}.cu" else None
        launch(program(build, its_edit), shape, given, (*got, delta), numbers, schedule, maps)
    for tensor in got:
        gaps = raw_bytes(tensor).view(case.dtype).view(*tensor.shape[:2], -1)[..., case.head_dim :]
        assert (bits(gaps) == bits(torch.full_like(gaps, NAN))).all(), "it wrote between its rows"
    return got


def in_fp64(problem: Problem, dout: torch.Tensor) -> Gradients:
    q, k, v = packed = [tensor.double().requires_grad_() for tensor in problem.packed]
    out = reference(replace(problem, packed=(q, k, v))).out
    gradients = torch.autograd.grad(out, packed, dout.double())
    return Gradients(*(torch.nan_to_num(gradient) for gradient in gradients))


def assert_same_bits(got: Gradients, want: Gradients) -> None:
    for name, one, other in zip(Gradients._fields, got, want, strict=True):
        differing = (bits(one) != bits(other)).any(-1)
        assert not differing.any(), f"{name}: rows that differ: {differing.nonzero().tolist()[:9]}"


@each_case
def test_gradients_are_near_fp64(case: Case) -> None:
    got, want = run(problem_of(case)), in_fp64(problem_of(case), dout_of(case))
    unit = 2.0**-8 if case.dtype == torch.bfloat16 else 2.0**-11
    for one, other in zip(got, want, strict=True):
        assert one.isfinite().all(), "every row is written"
        assert (one.double() - other).norm() <= 1.2 * unit * other.norm()


@each_case
@pytest.mark.parametrize(("tile", "schedule"), [(32, LAZY_SHUFFLED), (64, SHUFFLED)], ids=str)
def test_tiles_and_schedules_do_not_matter(case: Case, tile: int, schedule: Schedule) -> None:
    problem = problem_of(case)
    assert_same_bits(run(problem, schedule, tile=tile), run(problem))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("schedule", [EAGER, SHUFFLED, LAZY_SHUFFLED], ids=str)
def test_thread_blocks_take_tile_after_tile(
    head_dim: int, sms: int, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sequences are equally long: there are fewer blocks than tiles, in sections of four pairs."""
    monkeypatch.setattr(tiles, "_L2_BYTES", 4 * 110 * head_dim * 4 + 1)
    lengths = ((150, 150), (150, 170), (150, 10))
    problem = problem_of(Case(head_dim, torch.bfloat16, None, 4, 2, lengths))
    assert_same_bits(run(problem, schedule, hopper=True, sms=sms), run(problem))


LONG = {
    # Chunks begin in tiles, and where nobody sees a tile's keys; a sequence without keys, one without rows.
    64: Case(64, torch.float16, None, 8, 2, ((100, 100), (0, 70), (9, 0), (50, 300))),
    128: Case(128, torch.float16, None, 4, 1, ((200, 300), (3, 70), (0, 70), (9, 0))),
    256: Case(256, torch.float16, None, 8, 1, ((70, 140), (0, 70), (9, 0), (5, 5))),
}


@pytest.mark.parametrize("head_dim", LONG)
@pytest.mark.parametrize("schedule", [EAGER, LAZY_SHUFFLED], ids=str)
def test_chunks_are_added_up_in_their_order(
    head_dim: int,
    schedule: Schedule,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    problem = problem_of(LONG[head_dim])
    whole = run(problem)
    monkeypatch.setattr(backward, "CHUNK_ROWS", 128)
    program.cache_clear()  # builds take it
    request.addfinalizer(program.cache_clear)
    want = run(problem)
    assert not torch.equal(bits(want.dk), bits(whole.dk)), "chunks are no part of the sums"
    assert torch.equal(bits(want.dq), bits(whole.dq))
    for one, other in zip(want, in_fp64(problem, dout_of(problem.case)), strict=True):
        assert (one.double() - other).norm() <= 1.2 * 2.0**-11 * other.norm()
    assert_same_bits(run(problem, schedule, tile=32), want)
    assert_same_bits(run(problem, schedule, hopper=True), want)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("schedule", [EAGER, SHUFFLED, LAZY, LAZY_SHUFFLED], ids=str)
def test_hopper_has_the_generic_kernels_bits(case: Case, schedule: Schedule) -> None:
    # A tile is whole positions.
    case = case._replace(heads=case.kv_heads * 4) if 64 % (case.heads // case.kv_heads) else case
    problem = problem_of(case)
    assert_same_bits(run(problem, schedule, hopper=True), run(problem))


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=str)
def test_neighbours_do_not_matter(case: Case) -> None:
    """Every sequence alone gets the same gradients, from the same inputs."""
    got = run(problem_of(case))
    q_begin = k_begin = 0
    for q_length, k_length in case.lengths:
        rows, keys = slice(q_begin, q_begin + q_length), slice(k_begin, k_begin + k_length)
        if q_length and k_length:
            alone, forward, dout = cut(case, rows, keys)
            its = run(alone, forward=forward, dout=dout)
            assert_same_bits(its, Gradients(got.dq[rows], got.dk[keys], got.dv[keys]))
        q_begin, k_begin = rows.stop, keys.stop


def test_rows_of_no_sequence_are_left_alone() -> None:
    """Those before the first one and after the last one."""
    case = CASES[2]._replace(lengths=((10, 80), (20, 70), (30, 150)))
    whole = run(problem_of(case))
    part = replace(
        problem_of(case),
        case=case._replace(lengths=case.lengths[1:2]),
        request=replace(problem_of(case).request, sequences=1),
        cu_seqlens_q=torch.tensor([10, 30], dtype=torch.int32),
        lengths_k=torch.tensor([80, 150], dtype=torch.int32),
    )
    got = run(part, forward=generic_result(case), dout=dout_of(case))
    for one, other, rows in zip(got, whole, (slice(10, 30), *[slice(80, 150)] * 2), strict=True):
        assert torch.equal(bits(one[rows]), bits(other[rows]))
        assert one[: rows.start].isnan().all()
        assert one[rows.stop :].isnan().all()


def cut(case: Case, rows: slice, keys: slice) -> tuple[Problem, Result, torch.Tensor]:
    """One of the case's sequences, with what the forward and dout have for it."""
    whole, forward = problem_of(case), generic_result(case)
    lengths = rows.stop - rows.start, keys.stop - keys.start
    request = replace(
        whole.request,
        q=copied(whole.request.q[rows]),
        k=copied(whole.request.k[keys]),
        v=copied(whole.request.v[keys]),
        sequences=1,
        max_seqlen_q=lengths[0],
    )
    problem = replace(
        whole,
        case=case._replace(lengths=(lengths,)),
        request=request,
        cu_seqlens_q=offsets([lengths[0]]),
        lengths_k=offsets([lengths[1]]),
    )
    part = Result(copied(forward.out[rows]), forward.lse[rows].clone())
    return problem, part, copied(dout_of(case)[rows])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    it = gapped(tensor.shape, tensor.dtype, 8)
    it.copy_(tensor)
    return it


@pytest.mark.parametrize(
    ("file", "old", "new", "schedule"),
    [
        ("queries_wide", "mbarrier_sleep(full_rows, 0);", "", Schedule(seed=3)),
        ("queries_wide", "mbarrier_sleep(empty(stage), (round ^ ", "(void)((round ^ ", LAZY),
        ("queries_wide", "  release(kStages - 1);\n", "", EAGER),
        ("queries_wide", "if (static_cast<int>(n) >= whole) {", "if (false) {", EAGER),
        ("queries_wide", "static_cast<int>(total_k_arg) - end +", "0 +", EAGER),
        ("queries_wide", "    named_barrier(kBack, kConsumerThreads);", "", SHUFFLED),
        ("queries_wide", "    named_barrier(kGiven, kConsumerThreads);", "", LAZY),
        ("queries_wide", "    if (n > 0) release(stage);", "", LAZY),
        ("queries", "    mbarrier_sleep(full_rows(number), number / 2 % 2);\n", "", LAZY),
        ("queries", "    await_free();\n    if (thread", "    if (thread", SHUFFLED),
        (
            "queries",
            "      await_free();\n      const unsigned tile",
            "      const unsigned tile",
            LAZY,
        ),
        ("queries", "      release(stage == 0 ? kStages - 1 : stage - 1);", "", EAGER),
        ("queries", "          mbarrier_sleep(empty(stage), parity);\n", "", LAZY),
        ("queries", "    mbarrier_sleep(full(stage), parity);", "", LAZY),
        ("queries", "if (static_cast<int>(n) >= whole) {", "if (false) {", EAGER),
        ("queries", "static_cast<int>(total_k_arg) - end;", "0;", EAGER),
        ("queries", "    if (n > 0) release(its", "    if (n > 9) release(its", EAGER),
        ("queries", "    if (!is_last) wgmma_wait<1>();", "", LAZY),
        ("keys", "mbarrier_sleep(full_keys, 0);", "", Schedule(seed=2)),
        ("keys", "    mbarrier_sleep(full(stage), parity);", "", LAZY),
        (
            "keys",
            "      mbarrier_sleep(empty(stage), n / kStages % 2 ^ 1);\n      mbarrier_arrive_exp",
            "      mbarrier_arrive_exp",
            LAZY,
        ),
        ("keys", "static_cast<int>(total_q_arg) - seeing.q_length", "0", EAGER),
        ("keys", "first_key + again(warp) / 4 * 64)", "first_key)", EAGER),
        ("keys", "mbarrier_init(full(stage), 1 + 32);", "mbarrier_init(full(stage), 32);", LAZY),
        (
            "keys",
            "rows_at(its_stage) + kRowTile, n > 0);\n    differentiate",
            "rows_at(its_stage), n > 0);\n    differentiate",
            EAGER,
        ),
        ("keys at 64", "    if (n > 0) release(before);\n", "", EAGER),
        ("keys at 64", "    if (!is_last) wgmma_wait<2>();\n", "", LAZY),
        ("keys at 64", "    differentiate(its_stage);\n    end_sums();", "    end_sums();", EAGER),
        ("keys_wide", "      named_barrier(kGiven, kConsumerThreads);\n", "", SHUFFLED),
        ("keys_wide", "mbarrier_sleep(full_keys, 0);", "", Schedule(seed=3)),
        ("keys_wide", "mbarrier_sleep(full(stage), n / kStages % 2);", "", LAZY),
        ("keys_wide", "static_cast<int>(total_q_arg) - seeing.q_length", "0", EAGER),
        ("keys_wide", "    release(n);\n", "", LAZY),
        ("keys_wide", "kRanks * kConsumerThreads / 32);", "kConsumerThreads / 32);", LAZY),
        ("keys_wide", "[0] < first_key + kTileKeys)", "[0] < first_key)", EAGER),
        ("keys_wide", "b(rows_at(n % kStages, has_values)", "b(rows_at(n % kStages, true)", EAGER),
    ],
)
def test_what_is_wrong_on_hopper_is_noticed(
    file: str, old: str, new: str, schedule: Schedule
) -> None:
    file, _, narrow = file.partition(" at ")
    head_dim = 256 if file.endswith("wide") else int(narrow or SMALL.head_dim)
    queries = 300 if narrow else 150  # more blocks than stages
    case = SMALL._replace(lengths=((queries, 70), (queries, 300)), head_dim=head_dim)
    assert_noticed(
        case, Edit(f"attention_backward_{file}_sm90.cu", old, new), schedule, hopper=True
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "schedule"),
    [
        ("queries", "    if (block > 0) __syncthreads();", "   ", EAGER),
        (
            "queries",
            "    copy_async_wait_all();\n    __syncthreads();",
            "    __syncthreads();",
            LAZY,
        ),
        ("queries", "if (first_key >= warp_limit) continue;", "if (block > 0) continue;", EAGER),
        ("queries", "    rows.hide(scores, first_key, warp_row, lane);", "", EAGER),
        ("keys", "    __syncthreads();  // everybody is done with the last ones", "", SHUFFLED),
        ("keys", "    copy_async_wait_all();\n    __syncthreads();", "    __syncthreads();", LAZY),
        ("keys", "stats.hide(weights, first_key + part + again(lane) / 4, lane);", "", EAGER),
        ("keys", "seeing.first_block + n,", "seeing.first_block + n + 1,", EAGER),
        ("keys", "has_values ? dout_tile : q_tile", "q_tile", EAGER),
    ],
)
def test_what_is_wrong_is_noticed(file: str, old: str, new: str, schedule: Schedule) -> None:
    assert_noticed(SMALL, Edit(f"attention_backward_{file}.cu", old, new), schedule, hopper=False)


def assert_noticed(case: Case, edit: Edit, schedule: Schedule, *, hopper: bool) -> None:
    problem = problem_of(case)
    want = run(problem)
    with pytest.raises(AssertionError, match=r"that differ|deadlock:|fault:"):
        assert_same_bits(run(problem, schedule, hopper=hopper, edit=edit), want)
