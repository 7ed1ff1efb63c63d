"""A pass is what the control failed: verdicts from compared bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlbench.results.vocabulary import Status
from rlbench.run.verdict import judge, judge_control


def checks(*equal: bool) -> list[dict[str, Any]]:
    return [
        {"variation": f"v{i}", "equal": e, "differing": int(not e)} for i, e in enumerate(equal)
    ]


@pytest.mark.parametrize(
    ("equal", "failed", "status"),
    [
        ((True, True), {"v0": True, "v1": True}, Status.PASS),
        ((True, True), {"v0": True, "v1": False}, Status.UNPROVEN),
        ((True, True), {"v0": True}, Status.UNPROVEN),
        ((True, True), {}, Status.UNPROVEN),
        ((True, False), {"v0": True, "v1": True}, Status.FAIL),
        ((True, False), {}, Status.FAIL),
        ((False,), {"v0": False}, Status.FAIL),
        ((True,), {"v0": True, "other": False}, Status.PASS),
    ],
)
def test_status(equal: tuple[bool, ...], failed: Mapping[str, bool], status: Status) -> None:
    found, marked = judge(checks(*equal), failed)
    assert found is status
    assert [c["proven"] for c in marked] == [failed.get(f"v{i}", False) for i in range(len(equal))]


def test_checks_are_marked_and_otherwise_as_they_were() -> None:
    given = checks(True, False)
    _, marked = judge(given, {})
    assert [{k: v for k, v in c.items() if k != "proven"} for c in marked] == given
    assert all("proven" not in c for c in given)


@pytest.mark.parametrize(
    ("equal", "status"),
    [
        ((False, False), Status.FAIL),
        ((False, True), Status.UNPROVEN),
        ((True, True), Status.UNPROVEN),
    ],
)
def test_control_is_there_to_fail_every_check(equal: tuple[bool, ...], status: Status) -> None:
    found, marked = judge_control(checks(*equal))
    assert found is status
    assert [c["proven"] for c in marked] == [not e for e in equal]
