"""The parent's side of a run: one worker an engine, and a result for every job whatever happens."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from rlbench import discover
from rlbench.errors import MergeError
from rlbench.plan import Job, Plan, is_timed
from rlbench.results import atomic, schema
from rlbench.results.vocabulary import Status
from rlbench.run.process import WorkerProcess
from rlbench.run.protocol import COMPARED, Closed, Message
from rlbench.run.recorder import Recorder
from rlbench.run.saving import Destination
from rlbench.run.verdict import judge, judge_control

PROBE_TIMEOUT_S = 60.0


class Listener(Protocol):
    """Who shows what is going on."""

    def started(self, job: Job) -> None: ...

    def told(self, job: Job, text: str) -> None: ...

    def finished(self, job: Job, result: schema.Result) -> None: ...


@dataclass
class Answer:
    """What became of one job."""

    status: str
    reason: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    inputs_sha256: str | None = None
    resolved: Mapping[str, str] = field(default_factory=dict)
    output: str | None = None
    not_saved: str | None = None
    worker_is_gone: bool = False


def execute(
    plan: Plan,
    recorder: Recorder,
    listener: Listener,
    timeout_s: float,
    destination: Destination | None = None,
) -> None:
    """Measure every job of the plan that the recorder does not have, control first.

    destination: where outputs are saved, if they are.

    Whatever a worker does (dies, hangs, runs out of memory) costs the result of its job alone: the
    next job gets a fresh worker. While one engine is checked, the next one's worker imports; while
    latency is measured, no other worker does anything. KeyboardInterrupt passes through, after
    every worker is gone.
    """
    control = ControlAnswers(recorder.earlier_results())
    for job, reason in plan.unavailable:
        if job.key not in recorder.finished:
            listener.started(job)
            result = recorder.add(
                job,
                plan.environments[job.environment],
                Status.UNAVAILABLE,
                reason=reason,
                seconds=0.0,
                fields={},
            )
            listener.finished(job, result)
    todo = [job for job in plan.jobs if job.key not in recorder.finished]
    shifts = [list(jobs) for _, jobs in groupby(todo, key=lambda j: (j.environment, j.variant.id))]
    crews = [Crew(plan, recorder, timeout_s, jobs, destination) for jobs in shifts]
    try:
        for number, (jobs, crew) in enumerate(zip(shifts, crews, strict=True)):
            following = crews[number + 1] if number + 1 < len(crews) else None
            if following:
                following.begin_import(shifts[number + 1][0])
            for job in jobs:
                if following and is_timed(job.scenario):
                    following.end_import()
                listener.started(job)
                result = settle(job, crew, control, recorder, listener)
                listener.finished(job, result)
            crew.probe_after()
            crew.dismiss()
    except BaseException:
        # A second Ctrl-C must not leave workers behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for crew in crews:
            crew.kill()
        raise


def settle(
    job: Job, crew: Crew, control: ControlAnswers, recorder: Recorder, listener: Listener
) -> schema.Result:
    """Measure one job, judge it, record it."""
    begin = time.monotonic()
    answer = crew.measure(job, listener)
    status, fields = judged(job, answer, control)
    environment = crew.plan.environments[job.environment]
    taken = time.monotonic() - begin
    try:
        result = recorder.add(
            job,
            environment,
            status,
            reason=answer.reason,
            seconds=taken,
            fields=fields,
            inputs_sha256=answer.inputs_sha256,
            resolved=answer.resolved,
            output=answer.output,
        )
    except (MergeError, ValueError) as why:
        # Other inputs than before, or fields outside the schema: no measurement to keep.
        reason = str(why).splitlines()[0]
        result = recorder.add(
            job, environment, Status.ERROR, reason=reason, seconds=taken, fields={}
        )
    control.note(result, job.variant)
    return result


def judged(job: Job, answer: Answer, control: ControlAnswers) -> tuple[Status, Mapping[str, Any]]:
    """The verdict on an answer, and its fields with the checks marked."""
    if answer.status != COMPARED:
        return Status(answer.status), answer.fields
    checks = answer.fields["checks"]
    if job.variant.engine.is_control:
        status, marked = judge_control(checks)
    else:
        status, marked = judge(checks, control.failed(job))
    return status, {**answer.fields, "checks": marked}


class ControlAnswers:
    """Which checks the control failed, by op, case and scenario."""

    def __init__(self, earlier: Sequence[schema.Result]) -> None:
        """earlier: results of the report that is resumed."""
        self._failed: dict[tuple[str, str, str], dict[str, bool]] = {}
        for result in earlier:
            variant = discover.engines().get(result.engine)
            if variant is not None:
                self.note(result, variant)

    def note(self, result: schema.Result, variant: discover.Variant) -> None:
        """Remember a result if it is the control's."""
        if variant.engine.is_control:
            self._failed[(result.op, result.case, result.scenario)] = {
                check.variation: not check.equal for check in result.checks or ()
            }

    def failed(self, job: Job) -> Mapping[str, bool]:
        """Check name -> whether the control failed it; empty if it gave no answer."""
        return self._failed.get((job.op, job.case.id, job.scenario), {})


class Late(Exception):
    """The worker did not answer in time."""


class Nonsense(Exception):
    """The worker's channel carried a message that is no answer."""


def check_answer(message: Message) -> None:
    """Raises Nonsense unless the verdict can be formed from the message."""
    try:
        if message["status"] != COMPARED:
            Status(message["status"])
        elif not all(
            {"variation", "equal"} <= check.keys() for check in message["fields"]["checks"]
        ):
            raise Nonsense("a check without a variation")
    except (KeyError, TypeError, ValueError, AttributeError) as why:
        raise Nonsense(repr(why)) from why


class Crew:
    """The workers of one engine, one at a time; a new one after each that was lost."""

    def __init__(
        self,
        plan: Plan,
        recorder: Recorder,
        timeout_s: float,
        jobs: Sequence[Job],
        destination: Destination | None,
    ) -> None:
        self.plan = plan
        self.recorder = recorder
        self.timeout_s = timeout_s
        self._scenarios = list(dict.fromkeys(job.scenario for job in jobs))
        self.destination = destination
        self._saving: Path | None = None
        self._worker: WorkerProcess | None = None
        self._probed_by: Job | None = None
        self._importing = False
        self._import_hangs = False

    def measure(self, job: Job, listener: Listener) -> Answer:
        """Ask the worker, starting one if there is none; lose it if it fails."""
        try:
            order = self.destination.order(job) if self.destination else None
            self._saving = Path(order["path"]) if order else None
            worker = self._hire(job)
            self._require_import()
            worker.channel.send(
                {
                    "do": "measure",
                    "case": {"name": job.case.name, "dtype": job.case.dtype},
                    "scenario": job.scenario,
                    "passes": job.passes,
                    "save": order,
                }
            )
            answer = self._listen(job, worker, listener)
        except Closed:
            answer = self._died()
        except Late:
            worker.kill()
            reason = f"no answer within {self.timeout_s:g} s; --timeout raises the limit"
            answer = Answer("timeout", reason, output=worker.output_tail(), worker_is_gone=True)
        except Nonsense as why:
            worker.kill()
            reason = f"the worker's pipe carried what is no answer: {why}"
            answer = Answer("crash", reason, output=worker.output_tail(), worker_is_gone=True)
        except OSError as why:
            answer = Answer("crash", f"the worker could not be started: {why}", worker_is_gone=True)
        if answer.worker_is_gone:
            self._lose()
        if self.destination and answer.not_saved:
            self.destination.note_failure(job, answer.not_saved)
        return answer

    def probe_after(self) -> None:
        """Measure the ceilings once more, if latency was measured against them."""
        if self._worker is None or self._probed_by is None:
            return
        try:
            self._worker.channel.send({"do": "probe"})
            message = self._worker.channel.receive(PROBE_TIMEOUT_S)
        except Closed:
            return
        if message and message.get("is") == "probe":
            self._note_probe(self._probed_by, "after", message)
            self.recorder.save()

    def begin_import(self, job: Job) -> None:
        """Let a worker import the engine while another engine is being checked, not timed."""
        with contextlib.suppress(Closed, OSError):
            self._hire(job).channel.send({"do": "import"})
            self._importing = True

    def end_import(self) -> bool:
        """Wait until that is over: nobody else computes while latency is measured.

        False if it takes longer than a job may; the worker's first job then times out.
        """
        if self._worker is not None and self._importing:
            self._importing = False
            with contextlib.suppress(Closed):
                self._import_hangs = self._worker.channel.receive(self.timeout_s) is None
        return not self._import_hangs

    def _require_import(self) -> None:
        if not self.end_import():
            raise Late

    def dismiss(self) -> None:
        """Let the worker end by itself."""
        self._lose()

    def kill(self) -> None:
        """End the worker at once."""
        if self._worker is not None:
            self._worker.kill()
            self._lose()

    def _hire(self, job: Job) -> WorkerProcess:
        if self._worker is None:
            source = job.variant.source
            self._worker = WorkerProcess(
                self.plan.environments[job.environment].python,
                {
                    "engine": {
                        "name": source.name,
                        "module": source.module,
                        "file": source.file,
                        "options": dict(job.variant.options),
                    },
                    "op": job.op,
                    "device": self.plan.device,
                    "preset": self.plan.preset,
                    "scenarios": self._scenarios,
                },
            )
        return self._worker

    def _listen(self, job: Job, worker: WorkerProcess, listener: Listener) -> Answer:
        deadline = time.monotonic() + self.timeout_s
        while True:
            message = worker.channel.receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                raise Late
            kind = message.get("is")
            if kind == "progress":
                listener.told(job, str(message.get("text", "")))
            elif kind == "probe":
                self._probed_by = job
                self._note_probe(job, "before", message)
            elif kind == "answer":
                return self._answer(message, worker)

    def _answer(self, message: Message, worker: WorkerProcess) -> Answer:
        fatal = bool(message.get("fatal"))
        check_answer(message)
        return Answer(
            status=message["status"],
            reason=message.get("reason"),
            fields=message.get("fields", {}),
            inputs_sha256=message.get("inputs_sha256"),
            resolved=message.get("resolved", {}),
            output=worker.output_tail() if fatal else None,
            not_saved=str(message["not_saved"]) if message.get("not_saved") else None,
            worker_is_gone=fatal,
        )

    def _died(self) -> Answer:
        assert self._worker is not None
        how, said = self._worker.how_it_ended(), self._worker.output_tail()
        return Answer("crash", how, output=said, worker_is_gone=True)

    def _note_probe(self, job: Job, when: str, message: Message) -> None:
        try:
            ceilings = {name: float(message[name]) for name in ("tflops", "gbps")}
        except (KeyError, TypeError, ValueError) as why:
            raise Nonsense(repr(why)) from why
        environment = self.plan.environments[job.environment]
        self.recorder.add_probe(job, environment, when, ceilings)

    def _lose(self) -> None:
        # Taken out first: a signal while it closes must not find it here and close it again.
        worker, self._worker = self._worker, None
        self._import_hangs = self._importing = False
        if worker is not None:
            worker.close()
        if self._saving is not None:
            with contextlib.suppress(OSError):
                atomic.remove_remains(self._saving)
