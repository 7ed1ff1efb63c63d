"""The fixed words of a report. Standard library only: workers and renderers share them."""

from __future__ import annotations

from enum import Enum

SCHEMA = "rlbench.report/1"


class Status(str, Enum):
    """The verdict on one result; no other words exist."""

    PASS = "pass"
    """All bits equal in every check, and the control failed every one of those checks."""
    FAIL = "fail"
    """Some bits differ."""
    UNPROVEN = "unproven"
    """All bits equal, but in some check the control's were too, so nothing was shown."""
    MEASURED = "measured"
    """Accuracy or latency figures were taken."""
    UNSUPPORTED = "unsupported"
    """The engine does not offer this pass or shape."""
    UNAVAILABLE = "unavailable"
    """The engine cannot be imported or has no device here."""
    OOM = "oom"
    """Memory ran out."""
    TIMEOUT = "timeout"
    """The job outran its time limit and was killed."""
    CRASH = "crash"
    """The worker process died, or its CUDA context did."""
    ERROR = "error"
    """The engine raised."""


ANSWERED = frozenset({Status.PASS, Status.FAIL, Status.UNPROVEN, Status.MEASURED})
"""Statuses of results that carry a measurement; every other one carries a `reason`."""

BROKEN = frozenset({Status.CRASH, Status.TIMEOUT, Status.ERROR})
"""Statuses that make a run exit with 4."""


class Property(str, Enum):
    """What an invariance check is about, and what an engine's makers may claim."""

    BATCH_INVARIANT = "batch_invariant"
    """A sequence's bits do not depend on its neighbours or on where it stands among them."""
    CHUNK_INVARIANT = "chunk_invariant"
    """A prefill's bits do not depend on how it is cut into chunks."""
    DECODE_INVARIANT = "decode_invariant"
    """A decode step gives the bits of the same row of the whole prefill."""
    LAYOUT_INVARIANT = "layout_invariant"
    """Bits do not depend on page size, page order or what stands in unused slots."""
    BACKWARD_DETERMINISTIC = "backward_deterministic"
    """The same backward run again, in this or another process, gives the same bits."""
