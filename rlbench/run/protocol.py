"""What parent and worker say to each other: one JSON object a line, on two pipes of their own.

Parent to worker: first the set-up, then one request at a time.

    {"engine": {"id", "name", "module", "file", "options"}, "op", "device", "preset",
     "scenarios"}
    {"do": "measure", "case": {"name", "dtype"}, "scenario", "passes", "save"}
    {"do": "outputs", "case": …, "scenario", "variation", "path"}
    {"do": "import"}
    {"do": "warm"}
    {"do": "probe"}

Worker to parent:

    {"is": "progress", "text"}
    {"is": "imported"}
    {"is": "warm"}
    {"is": "probe", "tflops", "gbps"}
    {"is": "answer", "status", "reason", "fatal", "resolved", "inputs_sha256", "fields",
     "not_saved"}

`save` is null, or the `path` of a file for the outputs and its `metadata`; `not_saved` says why that
file was not written.
`status` is a word of the vocabulary, or `compared` for an invariance scenario whose verdict the
parent gives. After an answer with `fatal` the worker ends: its process may be damaged.
Engines print to standard output as they like; it is a file, and none of this.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

COMPARED = "compared"
Message = dict[str, Any]


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """A pair of pipe ends that carry one JSON object a line."""

    def __init__(self, read_fd: int, write_fd: int, peer_fd: int | None = None) -> None:
        """peer_fd: a pidfd of the process at the other end, whose death closes the channel.

        Without it, a child of that process that inherited its pipe would keep the channel open.
        """
        self.read_fd, self.write_fd = read_fd, write_fd
        self._watched = [read_fd] if peer_fd is None else [read_fd, peer_fd]
        self._held = [*self._watched, write_fd]
        self._pending = b""
        for fd in self._held:
            os.set_inheritable(fd, False)

    def send(self, message: Message) -> None:
        """Raises Closed if nobody reads any more."""
        data = json.dumps(message, allow_nan=False).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.write_fd, data) :]
        except BrokenPipeError as gone:
            raise Closed from gone

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None when `timeout_s` passed. Raises Closed at the end."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(self._watched, [], [], left)
            if not ready:
                return None
            if self.read_fd not in ready:
                raise Closed
            data = os.read(self.read_fd, 1 << 16)
            if not data:
                raise Closed
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        try:
            message = json.loads(line)
        except ValueError as nonsense:
            raise Closed from nonsense
        if not isinstance(message, dict):
            raise Closed
        return message

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())
