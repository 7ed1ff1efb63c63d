"""The worker: measures jobs inside an engine's own interpreter. Needs torch and the engine only."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench import discover
from rlbench.errors import MeasuringError, Unavailable, Unsupported
from rlbench.results.vocabulary import Status
from rlbench.run.process import without_folders
from rlbench.run.protocol import COMPARED, Channel, Closed, Message
from rlbench.run.saved_outputs import SavedOutputs
from rlbench.run.twin import Twin
from rlbench.scenarios._scenario import Context

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel, Workload

LONGEST_REASON = 600
ADVICE = " If reserved but unallocated memory is large"
"""How torch begins to advise after it has said what memory ran out of."""
PR_SET_PDEATHSIG = 1
"""prctl(2), from linux/prctl.h."""


def main(arguments: list[str]) -> None:
    """Serve the parent on the two pipe ends named by `arguments` until it hangs up."""
    die_with_parent()
    channel = Channel(int(arguments[0]), int(arguments[1]))
    try:
        set_up = channel.receive()
        assert set_up is not None
        session = Session(channel, set_up)
        while not session.damaged:
            request = channel.receive()
            assert request is not None
            session.serve(request)
    except Closed:
        pass
    # Not sys.exit: an engine's exit handlers may hang on a context that is already lost.
    sys.stdout.flush()
    os._exit(0)


def die_with_parent() -> None:
    """Let the kernel end this process with its parent: a job that hangs would outlive it for good.

    Where there is no prctl, a worker ends when it next speaks to a parent that is gone.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Session:
    """One engine on one device, and the jobs it is asked."""

    def __init__(self, channel: Channel, set_up: Message) -> None:
        self.channel = channel
        self.set_up = set_up
        self.engine = discover.Source(
            set_up["engine"]["name"], set_up["engine"]["module"], set_up["engine"]["file"]
        ).load()
        self.op = discover.ops()[set_up["op"]]
        self.device: str = set_up["device"]
        self.damaged = False
        self.twin = Twin(set_up)
        self._kernel: Kernel | None = None
        self._ceilings: dict[str, float] | None = None

    def serve(self, request: Message) -> None:
        """Answer one request."""
        if request["do"] == "import":
            self.import_modules()
            return
        if request["do"] == "warm":
            self.warm()
            return
        if request["do"] == "probe":
            self.probe()
            return
        if request["do"] == "outputs":
            self.channel.send(self.guarded(self.outputs_of_one_variation, request))
            return
        self.channel.send(self.guarded(self.measure, request))

    # --- the requests ----------------------------------------------------------------------

    def measure(self, request: Message) -> Message:
        """Run one scenario on one case."""
        scenario = discover.scenarios()[request["scenario"]]
        kernel = self.kernel()
        workload = self.workload(request)
        inputs = workload.fingerprint()
        if scenario.kind == "invariance":
            self.begin_twin(workload, kernel)
        elif scenario.kind == "latency":
            self.twin.settle()
        saved = SavedOutputs(request.get("save"))
        fields = scenario.measure(
            Context(
                workload=workload,
                kernel=kernel,
                passes=tuple(request["passes"]),
                device=self.device,
                elsewhere=lambda name: self.twin.outputs(request, name, self.device),
                ceilings=self.ceilings,
                tell=lambda text: self.channel.send({"is": "progress", "text": text}),
                keep=saved.keep,
            )
        )
        saved.write(inputs)
        status = COMPARED if scenario.kind == "invariance" else Status.MEASURED.value
        return {
            "status": status,
            "fields": fields,
            "inputs_sha256": inputs,
            "resolved": {name: str(value) for name, value in kernel.resolved.items()},
            "not_saved": saved.failure and without_folders(saved.failure),
        }

    def outputs_of_one_variation(self, request: Message) -> Message:
        """Compute the actual side of a variation and leave it in a file."""
        import torch

        from rlbench.scenarios._invariance import run_trial

        kernel, workload = self.kernel(), self.workload(request)
        for variation in workload.variations(request["scenario"]):
            if variation.name == request["variation"]:
                outputs = run_trial(kernel, variation.actual)
                torch.save({k: v.cpu() for k, v in outputs.items()}, request["path"])
                # The worker that asked goes on to measure beside this process.
                del outputs
                torch.cuda.empty_cache()
                return {"status": COMPARED, "fields": {}}
        raise KeyError(request["variation"])

    def import_modules(self) -> None:
        """Import what the engine needs, without touching the device; failures show up later."""
        for module in self.engine.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        self.channel.send({"is": "imported"})

    def warm(self) -> None:
        """Load the engine and make the device's context; failures show up later."""
        with contextlib.suppress(Exception):
            self.kernel()
        self.channel.send({"is": "warm"})

    def probe(self) -> None:
        """Measure this device's ceilings and tell the parent."""
        from rlbench.measure.device import probe

        self._ceilings = probe(self.device)
        self.channel.send({"is": "probe", **self._ceilings})

    # --- what they are made of --------------------------------------------------------------

    def kernel(self) -> Kernel:
        """The engine, loaded on first use. Raises Unavailable where it cannot be imported."""
        if self._kernel is None:
            loader = self.engine.load.get(self.op.name)
            if loader is None:
                raise Unsupported(f"does not compute {self.op.name}")
            options = self.set_up["engine"]["options"]
            if tuple(options.items()) not in self.engine.variants_for(self.op.name):
                raise Unsupported(f"does not compute {self.op.name} with these options")
            self._select_device()
            try:
                self._kernel = loader(options, self.device)
            except (ImportError, Unavailable) as why:
                reason = f"{why}; to get it: {self.engine.install}"
                raise Unavailable(reason) from why
        return self._kernel

    def _select_device(self) -> None:
        import torch

        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)

    def workload(self, request: Message) -> Workload:
        case = self.op.case(request["case"]["name"], request["case"]["dtype"])
        return self.op.load(case, self.set_up["preset"], self.device)

    def ceilings(self) -> dict[str, float]:
        if self._ceilings is None:
            self.probe()
        assert self._ceilings is not None
        return self._ceilings

    def begin_twin(self, workload: Workload, kernel: Kernel) -> None:
        """Let the fresh process load while this one checks, if some check is going to ask it."""
        known = discover.scenarios()
        if any(
            variation.actual.fresh_process and variation.pass_ not in kernel.unsupported
            for name in self.set_up["scenarios"]
            if known[name].kind == "invariance"
            for variation in workload.variations(name)
        ):
            self.twin.warm()

    # --- failures ---------------------------------------------------------------------------

    def guarded(self, work: Any, request: Message) -> Message:
        """`work(request)`, with whatever it raises turned into an answer."""
        try:
            return as_json({"is": "answer", **work(request)})
        except Unsupported as why:
            return _failure(Status.UNSUPPORTED, str(why))
        except Unavailable as why:
            return _failure(Status.UNAVAILABLE, str(why))
        except Closed:
            raise
        except BaseException as error:  # sys.exit in an engine is one, too
            self.damaged = True
            status = classify(error, self.device)
            return {**_failure(status, describe(error)), "fatal": True}


def classify(error: BaseException, device: str) -> Status:
    """Which status an exception is: `oom`, `crash` for a lost CUDA context, else `error`."""
    import torch

    text = str(error).lower()
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "allocate memory" in text)
    ):
        return Status.OOM
    if device.startswith("cuda"):
        try:
            torch.cuda.synchronize()
        except Exception:  # the kind depends on torch's version
            return Status.CRASH
    return Status.ERROR


def describe(error: BaseException) -> str:
    """`Type: message (file:line)` of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    kind = "" if isinstance(error, MeasuringError) else f"{type(error).__name__}: "
    said = str(error).partition(ADVICE)[0]
    return f"{kind}{said}"[:LONGEST_REASON] + where


def as_json(answer: Message) -> Message:
    """The answer itself. Raises ValueError for a figure that is not finite."""
    json.dumps(answer, allow_nan=False)
    return answer


def _failure(status: Status, reason: str) -> Message:
    text = without_folders(reason).strip() or "no message"
    text = text.encode(errors="backslashreplace").decode()
    return {"is": "answer", "status": status.value, "reason": text, "fields": {}}
