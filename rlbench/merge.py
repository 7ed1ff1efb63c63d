"""Reports -> one report, pure: a set union over keys.

Order never matters and merging twice changes nothing, because every conflict is either an error
or settled by content alone. What is measured anew in every run without being a result (`seconds`,
`at`) does not make two results different; the later one stays. docs/report-format.md has the
rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from rlbench.errors import MergeError
from rlbench.results.schema import Case, Engine, Environment, Report, Result, RunInfo
from rlbench.results.vocabulary import SCHEMA

VOLATILE = {"seconds", "at"}

Model = TypeVar("Model", bound=BaseModel)
Named = tuple[str, Report]


def merge(reports: Sequence[Named], *, newest: bool = False) -> Report:
    """One report from (name, report) pairs; the names stand in error messages.

    newest: of two results with the same key and other content, keep the later one instead of
    raising. Raises MergeError where the reports contradict each other: other inputs or parameters
    for a case, another interpreter behind an environment's name, another answer for a result.
    """
    if not reports:
        raise MergeError("nothing to merge: name at least one report")
    runs = _runs(reports)
    latest = max(runs, key=lambda run: (run.created, _canonical(run)))
    merged: dict[str, Any] = {
        "schema": SCHEMA,
        "created": latest.created,
        "argv": latest.argv,
        "rlbench": latest.rlbench,
        "runs": runs,
        "environments": _union(reports, lambda r: r.environments, lambda e: e.id, _environment),
        "engines": _union(reports, lambda r: r.engines, lambda e: (e.id, e.environment), _engine),
        "cases": _union(reports, lambda r: r.cases, lambda c: (c.op, c.id), _case),
        "results": _union(reports, lambda r: r.results, lambda r: r.key, _result_rule(newest)),
    }
    return Report(**{**_unknown_fields(reports), **merged})


Rule = Callable[[str, Model, str, Model], Model]


def _union(
    reports: Sequence[Named],
    items: Callable[[Report], Iterable[Model]],
    key: Callable[[Model], Hashable],
    settle: Rule[Model],
) -> list[Model]:
    """The items of all reports by key, sorted by it; `settle` decides between two of one key."""
    found: dict[Hashable, tuple[str, Model]] = {}
    for name, report in reports:
        for item in items(report):
            earlier = found.get(key(item))
            # A first item is settled with itself, so that it is sorted as after any merge.
            first, known = earlier or (name, item)
            kept = settle(first, known, name, item)
            found[key(item)] = (first if kept is known else name, kept)
    return [item for _, item in (found[k] for k in sorted(found, key=repr))]


def _environment(name: str, a: Environment, other: str, b: Environment) -> Environment:
    for field in ("python", "packages", "device"):
        if getattr(a, field) != getattr(b, field):
            raise MergeError(
                f"environment {a.id!r}: {field} differs between {name} and {other}: "
                f"{_difference(getattr(a, field), getattr(b, field))}; "
                "measure again under another --env name to keep both"
            )
    probes = {_canonical(p): p for p in (*a.probes, *b.probes)}
    union = [probes[k] for k in sorted(probes)]
    return _with_unknown(a, b).model_copy(update={"probes": union})


def _engine(name: str, a: Engine, other: str, b: Engine) -> Engine:
    resolved = dict(a.resolved)
    for key, value in b.resolved.items():
        if resolved.setdefault(key, value) != value:
            raise MergeError(
                f"engine {a.id!r} in {a.environment!r}: {key} resolved to {a.resolved[key]!r} in "
                f"{name} and to {value!r} in {other}"
            )
    claims = {_canonical(c): c for c in (*a.claims, *b.claims)}
    return _with_unknown(a, b).model_copy(
        update={
            "resolved": dict(sorted(resolved.items())),
            "claims": [claims[k] for k in sorted(claims)],
        }
    )


def _case(name: str, a: Case, other: str, b: Case) -> Case:
    if a.params != b.params or a.dtype != b.dtype:
        raise MergeError(
            f"case {a.id!r} of {a.op}: its parameters differ between {name} and {other}: "
            f"{_difference({'dtype': a.dtype, **a.params}, {'dtype': b.dtype, **b.params})}"
        )
    if a.inputs_sha256 != b.inputs_sha256:
        raise MergeError(
            f"case {a.id!r} of {a.op}: the inputs differ between {name} and {other} "
            f"({a.inputs_sha256[:12]}… and {b.inputs_sha256[:12]}…), so nothing measured on them "
            "can be compared; measure both with the same rlbench and preset"
        )
    return _with_unknown(a, b)


def _result_rule(newest: bool) -> Rule[Result]:
    def settle(name: str, a: Result, other: str, b: Result) -> Result:
        later = max(a, b, key=lambda r: (r.at, _canonical(r)))
        if newest or _content(a) == _content(b):
            return later
        raise MergeError(
            f"result {' / '.join(a.key)}: {name} and {other} have different answers "
            f"({a.status.value} of {a.at}, {b.status.value} of {b.at}); "
            "pass --on-conflict newest to keep the later one"
        )

    return settle


def _content(result: Result) -> str:
    return _canonical(result, VOLATILE)


def _runs(reports: Sequence[Named]) -> list[RunInfo]:
    runs: dict[str, RunInfo] = {}
    for _, report in reports:
        own = RunInfo(created=report.created, argv=report.argv, rlbench=report.rlbench)
        for run in report.runs or [own]:
            runs[_canonical(run)] = run
    return [runs[k] for k in sorted(runs)]


def _unknown_fields(reports: Sequence[Named]) -> dict[str, Any]:
    """Top-level fields this version does not know; of two values the larger JSON text stays."""
    found: dict[str, Any] = {}
    for _, report in reports:
        for key, value in (report.model_extra or {}).items():
            found[key] = max(found.get(key, value), value, key=_text)
    return dict(sorted(found.items()))


def _with_unknown(a: Model, b: Model) -> Model:
    """`a` with the fields unknown to this version that only `b` has, or has with a larger text."""
    extra = dict(a.model_extra or {})
    for key, value in (b.model_extra or {}).items():
        extra[key] = max(extra.get(key, value), value, key=_text)
    known = {name: getattr(a, name) for name in type(a).model_fields if name in a.model_fields_set}
    return type(a).model_validate({**known, **dict(sorted(extra.items()))})


def _difference(a: Any, b: Any) -> str:
    if isinstance(a, BaseModel):
        a, b = a.model_dump(), b.model_dump()
    if not isinstance(a, dict):
        return f"{a!r} and {b!r}"
    keys = [k for k in sorted({*a, *b}) if a.get(k) != b.get(k)][:3]
    return ", ".join(f"{k} {a.get(k)!r} and {b.get(k)!r}" for k in keys)


def _canonical(model: BaseModel, exclude: set[str] | None = None) -> str:
    return _text(model.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=exclude))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
