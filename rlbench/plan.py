"""From what the user asked and what the environments have: the jobs, and why others are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbench import discover
from rlbench.discover import Variant
from rlbench.errors import UsageError, unknown
from rlbench.ops._op import DTYPES, PRESETS, Case, Op

LOCAL = "local"


@dataclass(frozen=True)
class Environment:
    """One interpreter as its inspection found it."""

    id: str
    python: str
    """Path of the interpreter; stays on this machine, never goes into a report."""
    facts: Mapping[str, Any]
    """`python`, `packages`, `device`: what the report says of it."""
    why_not: Mapping[str, str | None]
    """Engine name -> why it cannot run here, or None."""
    device: str
    engines: tuple[str, ...] = ()
    """Engine ids to run here and nowhere else; empty: whatever it can run."""


@dataclass(frozen=True)
class Request:
    """What the user asked for, checked: every name in it exists."""

    op: Op
    engines: tuple[str, ...]
    """Engine ids, the control among them if it has to prove something."""
    only: tuple[str, ...]
    """The ids named by --only; being unavailable they make the run exit with 3."""
    scenarios: tuple[str, ...]
    passes: tuple[str, ...]
    models: tuple[str, ...] | None
    """Case names, or None for the device's default cases."""
    dtypes: tuple[str, ...]
    preset: str

    def cases(self, device: str) -> list[Case]:
        """The cases to measure on `device`."""
        models = self.models or self.op.default_cases[device.split(":", maxsplit=1)[0]]
        return [self.op.case(model, dtype) for model in models for dtype in self.dtypes]


@dataclass(frozen=True)
class Job:
    """One result to be measured."""

    op: str
    case: Case
    variant: Variant
    environment: str
    scenario: str
    passes: tuple[str, ...]
    command: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What makes a result unique in a report."""
        return (self.op, self.case.id, self.variant.id, self.environment, self.scenario)


@dataclass(frozen=True)
class Plan:
    """The work of one run."""

    device: str
    preset: str
    environments: Mapping[str, Environment]
    jobs: Sequence[Job]
    """In the order they run: the control first, then engine by engine."""
    unavailable: Sequence[tuple[Job, str]] = field(default_factory=tuple)
    """Jobs of engines that run in no environment, each with the reason."""


def make_request(
    op: Op,
    *,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    scenarios: Sequence[str] = (),
    passes: Sequence[str] = (),
    cases: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    preset: str = "default",
) -> Request:
    """Check every name the user gave. Raises UsageError, naming the option and what it knows."""
    _known("--scenario", scenarios, op.scenarios)
    _known("--pass", passes, op.passes)
    _known("--case", cases, op.models)
    _known("--dtype", dtypes, op.dtypes)
    _known("--preset", [preset], PRESETS)
    asked = scenarios or op.scenarios
    if passes and not any(p in passes for s in asked for p in op.scenarios[s]):
        raise UsageError(
            f"--pass {', '.join(passes)}: not exercised by --scenario {', '.join(asked)}; "
            + "; ".join(f"{s} exercises {', '.join(op.scenarios[s])}" for s in asked)
        )
    named = discover.select("--only", only)
    skipped = discover.select("--skip", skip)
    engines = [i for i in (named or serving(op)) if i not in skipped]
    if not engines:
        raise UsageError("--only and --skip together leave no engine to run")
    control = [i for i, v in discover.engines().items() if v.engine.is_control]
    ordered = [i for i in control if i not in skipped] + [i for i in engines if i not in control]
    return Request(
        op=op,
        engines=tuple(ordered),
        only=tuple(named),
        scenarios=tuple(s for s in op.scenarios if s in asked),
        passes=tuple(p for p in op.passes if p in (passes or op.passes)),
        models=tuple(dict.fromkeys(cases)) or None,
        dtypes=tuple(dict.fromkeys(dtypes)) or op.dtypes[:1],
        preset=preset,
    )


def serving(op: Op) -> list[str]:
    """The ids of the engines that compute `op`."""
    return [i for i, v in discover.engines().items() if v.computes(op.name)]


def make_plan(request: Request, environments: Sequence[Environment]) -> Plan:
    """Give every engine to the first environment that can run it: of those told to, if any is.

    An environment that was told what to run runs nothing else, except the control where no other
    can: without it nothing is proven.
    """
    device = environments[0].device
    jobs: list[Job] = []
    unavailable: list[tuple[Job, str]] = []
    for engine_id in request.engines:
        variant = discover.engines()[engine_id]
        home = _home(variant, environments)
        for job in _jobs(request, variant, (home or environments[0]).id, device):
            if home is None:
                unavailable.append((job, _why_nowhere(variant, environments)))
            else:
                jobs.append(job)
    return Plan(device, request.preset, {e.id: e for e in environments}, jobs, unavailable)


def _home(variant: Variant, environments: Sequence[Environment]) -> Environment | None:
    able = [e for e in environments if e.why_not.get(variant.name) is None]
    told = [e for e in environments if variant.id in e.engines]
    homes = [e for e in able if (e in told if told else not e.engines)]
    if variant.engine.is_control and not told:
        homes += able
    return homes[0] if homes else None


def _jobs(request: Request, variant: Variant, environment: str, device: str) -> list[Job]:
    """An engine's jobs, timings last: until then the next engine may be imported meanwhile."""
    jobs = list(_jobs_by_case(request, variant, environment, device))
    return sorted(jobs, key=lambda job: is_timed(job.scenario))


def _jobs_by_case(
    request: Request, variant: Variant, environment: str, device: str
) -> Iterable[Job]:
    for case in request.cases(device):
        for scenario in request.scenarios:
            if variant.engine.is_control and not is_invariance(scenario):
                continue
            passes = tuple(p for p in request.op.scenarios[scenario] if p in request.passes)
            if passes:
                command = reproduce(request, variant.id, case, scenario)
                yield Job(request.op.name, case, variant, environment, scenario, passes, command)


def is_invariance(scenario: str) -> bool:
    """Whether a scenario's results are verdicts on bits, which a control has to prove."""
    return discover.scenarios()[scenario].kind == "invariance"


def is_timed(scenario: str) -> bool:
    """Whether a scenario takes times, so that nobody else may compute meanwhile."""
    return discover.scenarios()[scenario].kind == "latency"


def reproduce(request: Request, engine: str, case: Case, scenario: str) -> str:
    """The command that measures one result again."""
    words = ["rlbench", request.op.name, "--only", engine, "--case", case.name]
    words += ["--scenario", scenario]
    if case.dtype != DTYPES[0]:
        words += ["--dtype", case.dtype]
    if request.preset != "default":
        words += ["--preset", request.preset]
    exercised = request.op.scenarios[scenario]
    if any(p not in request.passes for p in exercised):
        for pass_ in request.passes:
            words += ["--pass", pass_] if pass_ in exercised else []
    return " ".join(words)


def _why_nowhere(variant: Variant, environments: Sequence[Environment]) -> str:
    told = [e for e in environments if variant.id in e.engines] or environments
    reasons = {
        e.id: e.why_not.get(variant.name) or f"is told to run only {', '.join(e.engines)}"
        for e in told
    }
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _known(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    names = list(known)
    for word in given:
        if word not in names:
            raise unknown(option, word, names)
