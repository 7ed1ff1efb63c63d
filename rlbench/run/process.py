"""Starting this package's code in another interpreter, where it is not installed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import rlbench
from rlbench.run.protocol import Channel, Closed, Message

PACKAGE = str(Path(rlbench.__file__).resolve().parent)
BOOTSTRAP = """
import importlib.util, sys
where, module = sys.argv[1:3]
sys.path[:] = [p for p in sys.path if p]
spec = importlib.util.spec_from_file_location(
    "rlbench", where + "/__init__.py", submodule_search_locations=[where])
package = importlib.util.module_from_spec(spec)
sys.modules["rlbench"] = package
spec.loader.exec_module(package)
importlib.import_module(module).main(sys.argv[3:])
"""
"""Makes exactly the package `rlbench` importable, and nothing else of the parent's packages."""

_PATH_BEGINS = r"(?:(?<![\w.:/])|(?<=file://)|(?<=[\w.]:)|(?<=-[ILB]))"
"""Before a path: nothing of a word, `file://`, `name:`, or a compiler's -I, -L, -B."""

TAIL_LINES = 8
TAIL_CHARACTERS = 1200


def command(python: str, module: str, *arguments: str) -> list[str]:
    """The command line that runs `module.main(arguments)` under `python`."""
    return [python, "-c", BOOTSTRAP, PACKAGE, module, *arguments]


def environment(python: str, **extra: str) -> dict[str, str]:
    """The variables for a process under `python`: not the parent's path if it is another one."""
    variables = {**os.environ, **extra}
    if python != sys.executable:
        for name in ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__"):
            variables.pop(name, None)
    return variables


class WorkerProcess:
    """A worker: its process, its channel, and the file that its output goes to."""

    def __init__(
        self, python: str, set_up: Message, *, own_session: bool = True, **variables: str
    ) -> None:
        """own_session: leave the terminal's process group, so that Ctrl-C does not reach it."""
        to_worker, from_parent = os.pipe()
        to_parent, from_worker = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        try:
            self._process = subprocess.Popen(
                command(python, "rlbench.run.worker", str(to_worker), str(from_worker)),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(to_worker, from_worker),
                env=environment(python, **variables),
                start_new_session=own_session,
            )
        finally:
            os.close(to_worker)
            os.close(from_worker)
        self._own_session = own_session
        self._killed = False
        self.channel = Channel(to_parent, from_parent, os.pidfd_open(self._process.pid))
        with contextlib.suppress(Closed):  # the first request will find it gone
            self.channel.send(set_up)

    def kill(self) -> None:
        """End the process, and its children if it has a session of its own; wait for it."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                if self._own_session:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
        self._process.wait()

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the worker end by itself, then make sure of it, and free what it held here."""
        self.channel.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        finally:
            self.kill()
            self._log.close()

    def how_it_ended(self) -> str:
        """The exit code or signal of a worker that closed its channel."""
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its channel but did not end"
        return f"the worker {how(code)}"

    def output_tail(self) -> str:
        """The last lines of what the worker and its engine printed."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4 * TAIL_CHARACTERS))
        return tail(self._log.read().decode(errors="replace"))


def how(code: int) -> str:
    """What a process's return code says: `was killed by SIGSEGV`, `ended with exit code 1`."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    return f"ended with exit code {code}"


def tail(text: str) -> str:
    """The last lines of a program's output, without the folders of this machine."""
    lines = [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]
    return without_folders("\n".join(lines))[-TAIL_CHARACTERS:]


def without_folders(text: str) -> str:
    """Absolute paths cut to what follows site-packages, or to the file's name."""
    text = re.sub(r"/[^\s'\",:]*/(?:site|dist)-packages/", "", text)
    return re.sub(rf"{_PATH_BEGINS}/(?:[^\s/'\",:]+/)+", "", text)


def run_module(python: str, module: str, *arguments: str, timeout_s: float) -> str:
    """Standard output of `module.main(arguments)` under `python`.

    Raises OSError if it cannot be started, subprocess.SubprocessError if it fails; the latter's
    `stderr` says why.
    """
    done = subprocess.run(
        command(python, module, *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=True,
        env=environment(python),
    )
    return done.stdout
