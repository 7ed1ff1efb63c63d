"""Saving outputs, the parent's side: where each file goes, and what could not be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlbench import discover
from rlbench.errors import UsageError
from rlbench.plan import Job, Plan, Request
from rlbench.results.output_files import file_name, prepare
from rlbench.run.protocol import Message


def saves(scenario: str) -> bool:
    """Whether a scenario's outputs are saved: accuracy's, which cover every pass once."""
    return discover.scenarios()[scenario].kind == "accuracy"


@dataclass
class Destination:
    """The parent's side: the folder that the outputs of a run go to."""

    folder: Path
    not_saved: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> `engine (case)`, for each whose outputs could not be written."""

    def open(self, plan: Plan, request: Request) -> None:
        """Raises UsageError, before anything is measured, if nothing could be saved."""
        if not any(saves(scenario) for scenario in request.scenarios):
            raise UsageError(
                "--save-outputs: saves what the scenario accuracy computes, "
                "and --scenario leaves it out"
            )
        prepare(self.folder, (self.path(job).name for job in plan.jobs))

    def path(self, job: Job) -> Path:
        return self.folder / file_name(job.op, job.case.id, job.variant.id, job.environment)

    def order(self, job: Job) -> Message | None:
        """What the worker is told: `path` and `metadata`; None where nothing is saved."""
        if not saves(job.scenario):
            return None
        metadata = {
            "op": job.op,
            "case": job.case.id,
            "engine": job.variant.id,
            "environment": job.environment,
        }
        # Absolute: an engine may change its working directory.
        return {"path": str(self.path(job).absolute()), "metadata": metadata}

    def note_failure(self, job: Job, reason: str) -> None:
        """Remember that a job's outputs could not be written; its result is not touched."""
        self.not_saved.setdefault(reason, []).append(f"{job.variant.id} ({job.case.id})")

    def absent(self, jobs: Iterable[Job]) -> list[str]:
        """`engine (case)` of the jobs whose outputs should be in the folder and are not."""
        saved = [job for job in jobs if saves(job.scenario)]
        return [f"{j.variant.id} ({j.case.id})" for j in saved if not self.path(j).exists()]
