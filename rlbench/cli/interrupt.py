"""Ending early and cleanly."""

from __future__ import annotations

import signal
from typing import NoReturn


def end_on_sigterm_too() -> None:
    """From here on a SIGTERM does what Ctrl-C does, cleaning up on the way."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
