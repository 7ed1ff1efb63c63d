"""Every exception rlbench raises on purpose.

RlbenchError                one clear line for the user, with an exit code
├── UsageError              2  an option, a file or an interpreter that cannot be used as given
│   ├── ReportError         2  a report that cannot be read, written or understood
│   └── MergeError          2  reports that contradict each other
├── BuildError              4  an environment could not be built
└── MeasuringError          raised inside a worker; becomes a result's status
    ├── Unsupported         the engine does not offer this pass or shape
    └── Unavailable         the engine cannot run here at all
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RlbenchError(Exception):
    """Base of everything below; `str()` is fit to be shown to the user as it is."""

    exit_code = 4


class UsageError(RlbenchError):
    """Something the user gave cannot be used; says which option, its value and what would do."""

    exit_code = 2


class ReportError(UsageError):
    """A report file cannot be read, written or understood; names the file and the reason."""


class MergeError(UsageError):
    """Two reports contradict each other; names both files and the key they disagree about."""


class BuildError(RlbenchError):
    """An environment could not be built or listed; nothing half-made is left of it."""


class MeasuringError(RlbenchError):
    """Raised in a worker while measuring one job; never reaches the user as a traceback."""


class Unsupported(MeasuringError):
    """The engine does not offer this pass, shape or layout; the text is the result's reason."""


class Unavailable(MeasuringError):
    """The engine cannot be loaded in this environment or on this device."""


def unknown(option: str, value: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist: what was given, what was meant, what there is."""
    names = sorted(known)
    near = get_close_matches(value, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UsageError(f"{option}: {value!r} is not known.{hint} Known: {', '.join(names)}.")
