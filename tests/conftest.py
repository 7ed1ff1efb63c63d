"""What all tests share: `rlbench` as a process, with the fake engines installed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fake"))

from harness import SMALL, Done, Rlbench

# A shell that runs the tests in the background makes them ignore Ctrl-C, and so would every
# `rlbench` they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def rlbench(tmp_path: Path) -> Rlbench:
    """`rlbench` in an empty folder."""
    return Rlbench(tmp_path)


@pytest.fixture(scope="session")
def shared_rlbench(tmp_path_factory: pytest.TempPathFactory) -> Rlbench:
    """`rlbench` in a folder for runs that several tests look at."""
    return Rlbench(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def everything(shared_rlbench: Rlbench) -> Done:
    """The fake engine in all six scenarios; `everything.json` in the shared folder."""
    out = shared_rlbench.folder / "everything.json"
    return shared_rlbench("attention", *SMALL, "--only", "fake", "--out", out, code=0)
