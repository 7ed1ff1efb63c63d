"""The time of day, as reports write it."""

from __future__ import annotations

from datetime import datetime, timezone


def now() -> str:
    """UTC, ISO 8601, to the millisecond."""
    moment = datetime.now(timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
