"""From compared bits to a verdict, which only the control's failing can turn into a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlbench.results.vocabulary import Status

Check = dict[str, Any]


def judge(
    checks: Sequence[Check], control_failed: Mapping[str, bool]
) -> tuple[Status, list[Check]]:
    """The status of an invariance result, and its checks, each marked `proven` or not.

    control_failed: check name -> whether the control's bits differed there; empty if the control
    gave no answer on this case. A check is proven if the control failed that very check.
    """
    marked = [
        {**check, "proven": control_failed.get(check["variation"], False)} for check in checks
    ]
    if any(not check["equal"] for check in marked):
        return Status.FAIL, marked
    if all(check["proven"] for check in marked):
        return Status.PASS, marked
    return Status.UNPROVEN, marked


def judge_control(checks: Sequence[Check]) -> tuple[Status, list[Check]]:
    """The control's own verdict: to fail every check is what it is for."""
    marked = [{**check, "proven": not check["equal"]} for check in checks]
    failed_all = all(check["proven"] for check in marked)
    return Status.FAIL if failed_all else Status.UNPROVEN, marked
