"""The plans that the Python side makes of a problem, and running them.

Plans are made by the real code, with builds where it has loaded kernels, and a GPU of which nothing
is known but its number of SMs.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch

from emulation.builds import EAGER, Edit, Schedule, Shape, launch, program, raw_bytes
from emulation.problems import (
    NAN,
    Case,
    Problem,
    Result,
    assert_same_bits,
    bits,
    gapped,
    problem_of,
)
from rlbench.kernels.attention import (
    backward,
    combine,
    decode,
    generic,
    prefill,
    stream,
    tensor_map,
    tiles,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlbench.kernels.attention.launch import Plan


def generic_plan(problem: Problem) -> Plan:
    with _gpu():
        return tiles.plan(problem.request, generic.Variant(*problem.request.build))


def prefill_plan(
    problem: Problem, most_blocks: int = tiles.MAX_GRID, *, tma: bool = False, ranks: int = 1
) -> Plan:
    """tma: queries and packed keys come by TMA, if they can. ranks: blocks of a cluster."""
    with mock.patch.object(tensor_map, "are_on", return_value=tma):
        build, maps = prefill.build_of(problem.request, ranks)
    assert build.ranks == ranks
    with _gpu():
        own_numbers = prefill.own_numbers(problem.request)
        return tiles.plan(problem.request, build, most_blocks, own_numbers, maps)


def prefill_plan_on(problem: Problem, sms: int) -> Plan:
    """What a GPU of so many SMs gets."""
    with _gpu(sms):
        return prefill.plan(problem.request)


def decode_plan(problem: Problem, ranks: int = 4) -> Plan:
    """ranks: thread blocks that share a split, if so many can."""
    request = problem.request
    ranks = min(ranks, max(decode.ranks_for(problem.case.head_dim)))
    with _gpu():
        return decode.plan_of(request, decode.Variant(*request.build, ranks))


def stream_plan(problem: Problem, *, whole: bool, tma: bool = False) -> Plan:
    """whole: a thread block takes all splits of a sequence. tma: keys come by TMA, if they can."""
    patches = (
        mock.patch.object(stream, "takes_whole", return_value=whole),
        mock.patch.object(tensor_map, "are_on", return_value=tma),
        mock.patch.object(stream, "_copies_are_faster", return_value=False),
    )
    with _gpu(), patches[0], patches[1], patches[2]:
        return stream.plan(problem.request)


@contextmanager
def _gpu(sms: int = 1) -> Iterator[None]:
    with ExitStack() as patches:
        for module in (tiles, combine, decode, stream, backward):
            patches.enter_context(mock.patch.object(module, "kernel_of", lambda build, _: build))
        for module in (prefill, decode, stream, backward):
            patches.enter_context(mock.patch.object(module, "sms", return_value=sms))
        room = mock.patch.object(prefill, "clusters_at_once", lambda build, _: sms // build.ranks)
        patches.enter_context(room)
        yield


def run(
    problem: Problem, plan: Plan, schedule: Schedule = EAGER, edit: Edit | None = None
) -> Result:
    """Run the plan's launches, into memory full of NaN.

    edit: of the first launch's source.
    """
    request = problem.request
    out = gapped(request.out.shape, request.out.dtype, request.out.stride(1) - request.out.shape[2])
    lse = torch.full(request.q.shape[:2], NAN)
    work = torch.full((plan.work,), NAN) if plan.work else None
    tensors = (
        *(request.q, request.k, request.v, out, lse, work),
        *(problem.cu_seqlens_q, problem.lengths_k, request.block_table),
    )
    for number, (config, build, numbers, maps) in enumerate(plan.launches):
        ranks = getattr(build, "ranks", 1)
        shape = Shape(config.grid[0], config.block[0], ranks, config.shmem_size)
        executable = program(build, edit if number == 0 else None)
        launch(executable, shape, tensors, (out, lse, work), numbers, schedule, maps)
    gaps = raw_bytes(out).view(out.dtype).view(*out.shape[:2], -1)[..., out.shape[2] :]
    assert (bits(gaps) == bits(torch.full_like(gaps, NAN))).all(), "it wrote between its rows"
    return Result(out, lse)


@functools.cache
def generic_result(case: Case) -> Result:
    """What every kernel has to give."""
    problem = problem_of(case)
    return run(problem, generic_plan(problem))


def assert_noticed(problem: Problem, plan: Plan, schedule: Schedule, edit: Edit) -> None:
    """With the edit the bits are other than the generic kernel's, or it cannot go on."""
    want = generic_result(problem.case)
    with pytest.raises(AssertionError, match=r"that differ|deadlock:|fault:"):
        assert_same_bits(run(problem, plan, schedule, edit), want)
