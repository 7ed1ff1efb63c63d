"""What a run's exit code says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlbench.render.view import broken_claims
from rlbench.results.vocabulary import BROKEN, Status

if TYPE_CHECKING:
    from rlbench.plan import Request
    from rlbench.results.schema import Report

CLAIM_FAILED = 1
NOT_WRITTEN = 2
NOT_AVAILABLE = 3
SOMETHING_BROKE = 4
INTERRUPTED = 130


def of_run(report: Report, request: Request) -> int:
    """3: an engine asked for is unavailable; 4: a crash, timeout or error; 1: a claim failed.

    The order is that of usefulness: an incomplete run says so before it says what it found.
    """
    missing = {r.engine for r in report.results if r.status is Status.UNAVAILABLE}
    measured = {r.engine for r in report.results if r.status is not Status.UNAVAILABLE}
    if set(request.only) & (missing - measured):
        return NOT_AVAILABLE
    if any(result.status in BROKEN for result in report.results):
        return SOMETHING_BROKE
    return CLAIM_FAILED if broken_claims(report) else 0
