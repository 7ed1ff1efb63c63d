"""The report while it grows: every result is on disk before the next one is measured."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlbench.errors import MergeError, ReportError
from rlbench.merge import merge
from rlbench.ops._op import SEED
from rlbench.plan import Environment, Job
from rlbench.results import schema, store
from rlbench.results.vocabulary import ANSWERED, SCHEMA, Status
from rlbench.run.clock import now


class Recorder:
    """Collects what a run measures and keeps the report file current."""

    def __init__(
        self,
        out: Path,
        run: Mapping[str, Any],
        preset: str,
        earlier: schema.Report | None = None,
    ) -> None:
        """run: `created`, `argv`, `rlbench`. earlier: the report that is resumed."""
        self.out = out
        self.preset = preset
        self.write_error: ReportError | None = None
        self._environments: dict[str, dict[str, Any]] = {}
        self._engines: dict[tuple[str, str], dict[str, Any]] = {}
        self._cases: dict[tuple[str, str], dict[str, Any]] = {}
        self._results: dict[tuple[str, ...], dict[str, Any]] = {}
        self._run = run
        self._earlier = earlier
        self._texts: dict[tuple[str, ...], str] = {}
        """Every result as it stands in the file, so that saving one does not dump them all."""
        for result in self.earlier_results():
            self._texts[result.key] = store.dump_result(result)
        self.finished = {result.key for result in self.earlier_results()}
        """Keys of the results a resumed run need not measure again."""

    def earlier_results(self) -> list[schema.Result]:
        """The results of the report that is resumed."""
        return list(self._earlier.results) if self._earlier else []

    def admit(self, environments: Iterable[Environment]) -> None:
        """Raises MergeError if an environment is not the one the resumed report knows."""
        for case in self._earlier.cases if self._earlier else ():
            if case.params.get("preset") != self.preset:
                raise MergeError(
                    f"--resume: {self.out} was measured with --preset {case.params.get('preset')}, "
                    f"this run asks for {self.preset}; give the same preset or another --out"
                )
        for environment in environments:
            self._note_environment(environment)
        self.report()
        self._environments.clear()

    def known_inputs(self, job: Job) -> str | None:
        """The inputs' digest that this case had in its first result, here or before a resume."""
        mine = self._cases.get((job.op, job.case.id))
        if mine:
            return str(mine["inputs_sha256"])
        for case in self._earlier.cases if self._earlier else ():
            if (case.op, case.id) == (job.op, job.case.id):
                return case.inputs_sha256
        return None

    def add(
        self,
        job: Job,
        environment: Environment,
        status: Status,
        *,
        reason: str | None,
        seconds: float,
        fields: Mapping[str, Any],
        inputs_sha256: str | None = None,
        resolved: Mapping[str, str] | None = None,
        output: str | None = None,
    ) -> schema.Result:
        """Add one result and save.

        Raises MergeError for inputs or resolved values unlike those of earlier results, ValueError
        for fields outside the schema; nothing of the result is then kept.
        """
        with self._all_or_nothing():
            return self._add(
                job,
                environment,
                status,
                seconds,
                fields,
                reason=reason,
                inputs_sha256=inputs_sha256,
                resolved=resolved,
                output=output,
            )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        before = (copy.deepcopy(self._engines), dict(self._cases), dict(self._results))
        try:
            yield
        except (MergeError, ValueError):
            self._engines, self._cases, self._results = before
            raise

    def _add(
        self,
        job: Job,
        environment: Environment,
        status: Status,
        seconds: float,
        fields: Mapping[str, Any],
        *,
        reason: str | None,
        inputs_sha256: str | None,
        resolved: Mapping[str, str] | None,
        output: str | None,
    ) -> schema.Result:
        self._note_environment(environment)
        self._note_engine(job, resolved or {})
        if inputs_sha256:
            self._note_case(job, inputs_sha256)
        record = {
            "op": job.op,
            "case": job.case.id,
            "engine": job.variant.id,
            "environment": job.environment,
            "scenario": job.scenario,
            "status": status.value,
            "command": job.command,
            "seconds": round(seconds, 3),
            "at": now(),
            **fields,
        }
        if status not in ANSWERED:
            record["reason"] = reason or "no reason was given"
        if output:
            record["output"] = output
        result = schema.Result.model_validate(record)
        self._results[job.key] = record
        self._texts[job.key] = store.dump_result(result)
        self.save()
        return result

    def add_probe(
        self, job: Job, environment: Environment, when: str, probe: Mapping[str, float]
    ) -> None:
        """Add a measurement of the device's ceilings."""
        self._note_environment(environment)
        self._environments[environment.id]["probes"].append(
            {
                "engine": job.variant.id,
                "when": when,
                "at": now(),
                "tflops": probe["tflops"],
                "gbps": probe["gbps"],
            }
        )

    def report(self) -> schema.Report:
        """Everything so far, the resumed report included."""
        return self._merged(list(self._results.values()), self._earlier)

    def save(self) -> None:
        """Write the report; a failure is kept in `write_error` and measuring goes on."""
        earlier = self._earlier.model_copy(update={"results": []}) if self._earlier else None
        head = self._merged([], earlier)
        # In the order of a merged report, which this file is going to be.
        texts = [self._texts[key] for key in sorted(self._texts, key=repr)]
        self._write(store.dump_around(head, texts))

    def replace(self, report: schema.Report) -> None:
        """Write this report in place of the run's own."""
        self._write(store.dump(report))

    def _write(self, text: str) -> None:
        try:
            store.save_text(text, self.out)
            self.write_error = None
        except ReportError as why:
            self.write_error = why

    def _merged(
        self, results: list[dict[str, Any]], earlier: schema.Report | None
    ) -> schema.Report:
        own = schema.Report.model_validate(
            {
                "schema": SCHEMA,
                **self._run,
                "environments": list(self._environments.values()),
                "engines": list(self._engines.values()),
                "cases": list(self._cases.values()),
                "results": results,
            }
        )
        both = [("this run", own)]
        if earlier:
            both.append((f"the report resumed, {self.out}", earlier))
        return merge(both, newest=True)

    def _note_environment(self, environment: Environment) -> None:
        self._environments.setdefault(
            environment.id, {"id": environment.id, **environment.facts, "probes": []}
        )

    def _note_engine(self, job: Job, resolved: Mapping[str, str]) -> None:
        record = self._engines.setdefault(
            (job.variant.id, job.environment),
            {
                "id": job.variant.id,
                "environment": job.environment,
                "claims": [
                    {"property": claim.property.value, "source": claim.source}
                    for claim in job.variant.engine.claims_of(dict(job.variant.options))
                ],
                "resolved": {},
            },
        )
        record["resolved"].update(resolved)

    def _note_case(self, job: Job, inputs_sha256: str) -> None:
        record = {
            "op": job.op,
            "id": job.case.id,
            "params": {**job.case.params, "preset": self.preset, "seed": SEED},
            "dtype": job.case.dtype,
            "inputs_sha256": inputs_sha256,
        }
        known = self.known_inputs(job)
        if known and known != inputs_sha256:
            raise MergeError(
                f"the inputs of case {job.case.id!r} here ({inputs_sha256[:12]}…) are not those of "
                f"the results before ({known[:12]}…), so nothing measured on them can be compared"
            )
        self._cases.setdefault((job.op, job.case.id), record)
