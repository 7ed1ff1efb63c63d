"""Saving outputs, the worker's side: the tensors of one job on their way into a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rlbench.run.protocol import Message

if TYPE_CHECKING:
    import torch


class SavedOutputs:
    """Keeps tensors and writes them in the end. No failure here may cost the job its result."""

    def __init__(self, order: Message | None) -> None:
        """order: `path` and `metadata`, or None where nothing is to be saved."""
        self._order = order
        self._tensors: dict[str, torch.Tensor] = {}
        self.failure: str | None = None
        """Why the file was not written."""

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, for engines may hand out a buffer that the next call overwrites."""
        if self._order is not None:
            self._try(lambda: self._tensors.update({name: tensor.detach().to("cpu", copy=True)}))

    def write(self, inputs_sha256: str) -> None:
        """Write what was kept, all of it or nothing."""
        if self._order is not None and self._tensors:
            from rlbench.run import tensor_file

            path = Path(self._order["path"])
            metadata = {**self._order["metadata"], "inputs_sha256": inputs_sha256}
            self._try(lambda: tensor_file.write(path, self._tensors, metadata))

    def _try(self, work: Callable[[], None]) -> None:
        if self.failure is None:
            try:
                work()
            except OSError as why:
                self.failure = why.strerror or str(why)
            except Exception as why:
                self.failure = f"{type(why).__name__}: {why}"
