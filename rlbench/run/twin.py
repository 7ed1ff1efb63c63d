"""The fresh process that a worker checks itself against: the same engine, its own CUDA context."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rlbench.engines._engine import PROCESS_NUMBER
from rlbench.run.process import WorkerProcess
from rlbench.run.protocol import COMPARED, Closed, Message

if TYPE_CHECKING:
    from rlbench.ops._op import Outputs


class Twin:
    """Started when first needed, or earlier so that it loads while its worker is checking."""

    def __init__(self, set_up: Message) -> None:
        self._set_up = set_up
        self._process: WorkerProcess | None = None
        self._warming = False

    def warm(self) -> None:
        """Begin to load the engine; a failure shows up when the twin is asked."""
        if self._process is None:
            with contextlib.suppress(Closed):
                self._hire().channel.send({"do": "warm"})
                self._warming = True

    def settle(self) -> None:
        """Wait until that is over: nobody else computes while something is timed."""
        with contextlib.suppress(Closed):
            self._finish_warming()

    def outputs(self, request: Message, variation: str, device: str) -> Outputs:
        """The outputs of a variation of `request`'s scenario, on `device`.

        Raises RuntimeError, with the reason, if the twin died or could not compute them.
        """
        import torch

        twin = self._hire()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "outputs.pt")
            question = {**request, "do": "outputs", "variation": variation, "path": path}
            try:
                self._finish_warming()
                twin.channel.send(question)
                answer = twin.channel.receive()
            except Closed as gone:
                how = f"{twin.how_it_ended()}: {twin.output_tail()}"
                raise RuntimeError(f"the fresh process died: {how}") from gone
            assert answer is not None
            if answer["status"] != COMPARED:
                raise RuntimeError(f"in a fresh process: {answer['reason']}")
            outputs: Outputs = torch.load(path, map_location=device, weights_only=True)
            return outputs

    def _hire(self) -> WorkerProcess:
        if self._process is None:
            self._process = WorkerProcess(
                sys.executable, self._set_up, own_session=False, **{PROCESS_NUMBER: "1"}
            )
        return self._process

    def _finish_warming(self) -> None:
        if self._process is not None and self._warming:
            self._warming = False
            self._process.channel.receive()
