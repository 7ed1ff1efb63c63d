"""What a raised exception becomes in a result."""

from __future__ import annotations

import os

import pytest
import torch

from rlbench.results.vocabulary import Status
from rlbench.run.worker import LONGEST_REASON, _failure, classify, describe


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), Status.OOM),
        (torch.OutOfMemoryError("CUDA out of memory"), Status.OOM),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Status.OOM),
        (RuntimeError("HIP error: out of memory"), Status.OOM),
        (ValueError("out of memory"), Status.ERROR),
        (RuntimeError("launch failed"), Status.ERROR),
        (SystemExit(1), Status.ERROR),
        (KeyboardInterrupt(), Status.ERROR),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(
    error: BaseException, status: Status
) -> None:
    assert classify(error, "cpu") is status


def test_a_reason_names_the_type_the_message_and_the_place() -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing") as caught:
        fail()
    said = describe(caught.value)
    assert said.startswith("ValueError: no such thing (test_run_exceptions.py:")


def test_what_memory_ran_out_of_is_said_without_the_advice() -> None:
    advice = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=x"
    said = describe(torch.OutOfMemoryError("Tried to allocate 256.50 GiB." + advice))
    assert said == "OutOfMemoryError: Tried to allocate 256.50 GiB."


def test_a_reason_stays_short() -> None:
    assert len(describe(RuntimeError("x" * 100_000))) < LONGEST_REASON + 100


def test_a_reason_can_be_written_whatever_bytes_it_came_from() -> None:
    error = OSError(os.fsdecode(b"kernel \xff.cu is not there"))
    reason = str(_failure(Status.ERROR, describe(error))["reason"])
    assert b".cu is not there" in reason.encode()
