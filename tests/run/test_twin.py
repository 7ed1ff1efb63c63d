"""The fresh process: loaded ahead, never while something is timed, asked once it is ready."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlbench.run import twin as module
from rlbench.run.protocol import Closed, Message
from rlbench.run.twin import Twin

REQUEST: Message = {"do": "measure", "scenario": "backward"}


class Process:
    """A worker that answers every question with its numbers and notes what it was told."""

    def __init__(self, python: str, set_up: Message, **given: Any) -> None:
        self.channel = self
        self.heard: list[str] = [f"set-up {set_up['op']}"]
        self.answers: list[Message] = []
        self.dead = False

    def send(self, message: Message) -> None:
        if self.dead:
            raise Closed
        self.heard.append(message["do"])
        if message["do"] == "outputs":
            torch.save({"dq": torch.ones(2)}, message["path"])
        self.answers.append({"is": "warm"} if message["do"] == "warm" else {"status": "compared"})

    def receive(self) -> Message:
        if self.dead:
            raise Closed
        self.heard.append("answered")
        return self.answers.pop(0)

    def how_it_ended(self) -> str:
        return "the worker ended with exit code 5"

    def output_tail(self) -> str:
        return "last words"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    made: list[Process] = []

    def start(*args: Any, **given: Any) -> Process:
        made.append(Process(*args, **given))
        return made[-1]

    monkeypatch.setattr(module, "WorkerProcess", start)
    return made


def test_it_loads_ahead_and_is_asked_when_that_is_over(processes: list[Process]) -> None:
    twin = Twin({"op": "attention"})
    twin.warm()
    twin.warm()
    assert processes[0].heard == ["set-up attention", "warm"]
    outputs = twin.outputs(REQUEST, "another process", "cpu")
    assert processes[0].heard[2:] == ["answered", "outputs", "answered"]
    assert torch.equal(outputs["dq"], torch.ones(2))
    twin.outputs(REQUEST, "another process", "cpu")
    assert processes[0].heard[5:] == ["outputs", "answered"]
    assert len(processes) == 1


def test_settling_waits_once_for_what_was_begun(processes: list[Process]) -> None:
    twin = Twin({"op": "attention"})
    twin.settle()
    assert not processes, "nothing was begun"
    twin.warm()
    twin.settle()
    twin.settle()
    assert processes[0].heard[1:] == ["warm", "answered"]


def test_one_that_died_while_loading_says_so_when_it_is_asked(processes: list[Process]) -> None:
    twin = Twin({"op": "attention"})
    twin.warm()
    processes[0].dead = True
    twin.settle()
    with pytest.raises(RuntimeError, match=r"the fresh process died: .* exit code 5: last words"):
        twin.outputs(REQUEST, "another process", "cpu")
