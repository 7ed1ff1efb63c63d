"""A worker process can be ended at any moment, and its two pipe ends are given back once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlbench.run.process import WorkerProcess
from rlbench.run.protocol import Channel, Closed


def test_a_closing_that_was_interrupted_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerProcess(sys.executable, {})
    with monkeypatch.context() as interrupted:

        def stopped(*_: object, **__: object) -> int:
            raise KeyboardInterrupt

        interrupted.setattr(subprocess.Popen, "wait", stopped)
        with pytest.raises(KeyboardInterrupt):
            worker.close()
    # Its numbers may be another file's by now, which a second closing must not touch.
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    worker.kill()
    worker.close()
    for file in files:
        os.close(file)


def test_a_worker_that_was_told_nonsense_says_how_it_ended() -> None:
    worker = WorkerProcess(sys.executable, {"engine": None})
    with pytest.raises(Closed):
        worker.channel.receive(60.0)
    assert worker.how_it_ended() == "the worker ended with exit code 1"
    assert "TypeError" in worker.output_tail()
    assert "/" not in worker.output_tail().split('File "')[1].split('"')[0]
    worker.close()


@pytest.fixture
def pair() -> tuple[Channel, Channel]:
    """Both ends of a conversation."""
    here, there = os.pipe(), os.pipe()
    return Channel(here[0], there[1]), Channel(there[0], here[1])


def test_a_message_arrives_whole_however_long_it_is(pair: tuple[Channel, Channel]) -> None:
    parent, worker = pair
    worker.send({"text": "x" * 30_000, "line": "a\nb"})
    worker.send({"n": 2})
    assert parent.receive(5.0) == {"text": "x" * 30_000, "line": "a\nb"}
    assert parent.receive(5.0) == {"n": 2}
    assert parent.receive(0.0) is None
    parent.close()
    worker.close()


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n", b"\xff\n", b"7\n"])
def test_what_is_no_message_ends_the_conversation(
    line: bytes, pair: tuple[Channel, Channel]
) -> None:
    parent, worker = pair
    os.write(worker.write_fd, line)
    with pytest.raises(Closed):
        parent.receive(5.0)
    parent.close()
    worker.close()


def test_speaking_to_nobody_is_noticed(pair: tuple[Channel, Channel]) -> None:
    parent, worker = pair
    worker.close()
    with pytest.raises(Closed):
        parent.send({"n": 1})
    with pytest.raises(Closed):
        parent.receive(5.0)
    parent.close()
