"""The report's schema: what it refuses, and that nothing in a report is lost or added."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from rlbench.results import store
from rlbench.results.schema import Report, Result
from rlbench.results.vocabulary import ANSWERED, SCHEMA, Status

CHECK = {
    "variation": "first of 2",
    "pass": "prefill",
    "property": "batch_invariant",
    "equal": True,
    "elements": 10,
    "differing": 0,
    "max_ulp": 0,
    "nans": 0,
    "first": None,
    "proven": True,
}
ERRORS = dict.fromkeys(
    ("max_abs", "mean_abs", "rel_rms", "ulp_p50", "ulp_p99", "ulp_max", "ratio_to_torch"), 1
)
POINT = {
    "pass": "decode",
    "shape": "1x8",
    "timer": "wall-clock",
    "median_us": 2.0,
    "p10_us": 1.0,
    "p90_us": 3.0,
    "repeats": 20,
    "cv": 0.1,
    "percent_of_ceiling": 50.0,
}


def result(status: str = "pass", **fields: Any) -> dict[str, Any]:
    return {
        "op": "attention",
        "case": "tiny",
        "engine": "e",
        "environment": "local",
        "scenario": "batch",
        "status": status,
        "command": "rlbench attention",
        "seconds": 1.0,
        "at": "2026-01-01T00:00:00.000Z",
        **fields,
    }


def report(**fields: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "created": "2026-01-01T00:00:00.000Z",
        "argv": ["rlbench", "attention"],
        "rlbench": {"version": "0.1.0", "commit": None, "dirty": None},
        **fields,
    }


MEASUREMENTS: dict[Status, dict[str, Any]] = {
    Status.PASS: {"checks": [CHECK]},
    Status.FAIL: {"checks": [CHECK]},
    Status.UNPROVEN: {"checks": [CHECK]},
    Status.MEASURED: {"errors": {"out": ERRORS}},
}


@pytest.mark.parametrize("status", Status)
def test_reason_exactly_when_nothing_was_measured(status: Status) -> None:
    measured = MEASUREMENTS.get(status, {})
    reason = {} if status in ANSWERED else {"reason": "why"}
    assert Result.model_validate(result(status.value, **measured, **reason)).status is status
    other = {"reason": "why"} if status in ANSWERED else {}
    with pytest.raises(ValidationError, match="the reason disagree"):
        Result.model_validate(result(status.value, **measured, **other))


@pytest.mark.parametrize("status", Status)
def test_measurements_exactly_when_answered(status: Status) -> None:
    wrong = {} if status in ANSWERED else {"checks": [CHECK]}
    reason = {} if status in ANSWERED else {"reason": "why"}
    with pytest.raises(ValidationError, match="the measurements disagree"):
        Result.model_validate(result(status.value, **wrong, **reason))


def test_latency_counts_as_a_measurement_and_empty_lists_do_not() -> None:
    assert Result.model_validate(result("measured", points=[POINT])).points
    nothing: list[dict[str, Any]] = [{"points": []}, {"errors": {}}, {"checks": []}]
    for empty in nothing:
        with pytest.raises(ValidationError, match="the measurements disagree"):
            Result.model_validate(result("measured", **empty))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ValidationError, match="strict JSON"):
        Result.model_validate(result("pass", checks=[CHECK]) | {"seconds": value})
    with pytest.raises(ValidationError, match="strict JSON"):
        Result.model_validate(result("measured", points=[POINT | {"median_us": value}]))
    with pytest.raises(ValidationError, match="strict JSON"):
        Result.model_validate(result("measured", errors={"out": ERRORS | {"max_abs": value}}))


@pytest.mark.parametrize(
    "change",
    [
        {"status": "passed"},
        {"checks": [CHECK | {"property": "invariant"}]},
        {"digests": {"out": "abc"}},
        {"digests": {"out": "A" * 64}},
        {"checks": [{k: v for k, v in CHECK.items() if k != "proven"}]},
    ],
)
def test_words_and_digests_outside_the_vocabulary_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Result.model_validate(result("pass", checks=[CHECK]) | change)


@pytest.mark.parametrize("timer", ["cuda-graph", "cuda-events", "wall-clock"])
def test_timers_are_three(timer: str) -> None:
    assert Result.model_validate(result("measured", points=[POINT | {"timer": timer}]))
    with pytest.raises(ValidationError):
        Result.model_validate(result("measured", points=[POINT | {"timer": timer + "s"}]))


def full() -> dict[str, Any]:
    """A report with a field of the future at every level."""
    device = {"name": "H", "compute_capability": [9, 0], "new": 1}
    probe = {
        "engine": "e",
        "when": "before",
        "at": "t",
        "tflops": 1.5,
        "gbps": 2.5,
        "new": {"deep": [1, None]},
    }
    environment = {
        "id": "local",
        "python": "3.11",
        "packages": {"torch": "2.13.0"},
        "device": device,
        "probes": [probe],
        "new": [],
    }
    claim = {"property": "batch_invariant", "source": "s", "new": "x"}
    engine: dict[str, Any] = {
        "id": "e",
        "environment": "local",
        "claims": [claim],
        "resolved": {},
        "new": None,
    }
    case = {
        "op": "attention",
        "id": "tiny",
        "params": {"q_heads": 4},
        "dtype": "bf16",
        "inputs_sha256": "0" * 64,
        "new": True,
    }
    first = {"tensor": "out", "index": [1, 2], "expected": "1", "got": "2", "new": 3}
    check = CHECK | {"equal": False, "differing": 1, "first": first, "new": "…"}
    skipped = {"variation": "v", "reason": "r", "new": 0}
    return report(
        runs=[
            {"created": "t", "argv": [], "rlbench": {"version": "9", "commit": "c", "dirty": True}}
        ],
        environments=[environment],
        engines=[engine],
        cases=[case],
        results=[
            result("fail", checks=[check], skipped=[skipped], digests={"out": "f" * 64}, new=1),
            result("measured", scenario="latency", points=[POINT | {"new": 1}])
            | {"scenario": "latency"},
            result("oom", reason="no memory", output="Traceback", scenario="decode"),
        ],
        new={"at": "the top"},
    )


def test_loading_and_dumping_keeps_every_field_and_adds_none() -> None:
    text = json.dumps(full())
    dumped = store.dump(store.parse(text, "r.json"))
    assert json.loads(dumped) == full()
    assert store.dump(store.parse(dumped, "r.json")) == dumped


def test_dump_is_exactly_what_was_set() -> None:
    smallest = report()
    assert json.loads(store.dump(store.parse(json.dumps(smallest), "r.json"))) == smallest


def test_dump_is_strict_json_even_of_unknown_fields() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(store.dump(Report.model_validate(report(new=math.nan))), parse_constant=refuse)


def test_missing_optional_fields_of_an_older_report_have_defaults() -> None:
    loaded = store.parse(json.dumps(report(results=[result("measured", points=[POINT])])), "r")
    assert loaded.runs == [] and loaded.environments == []
    (point,) = loaded.results[0].points or []
    assert (point.kernels, point.tflops, point.timer_note) == ([], None, None)


def test_json_schema_names_every_field_as_the_file_does() -> None:
    described = Report.model_json_schema(by_alias=True)
    assert "schema" in described["required"]
    assert "pass" in described["$defs"]["Check"]["properties"]
    assert described["$defs"]["Status"]["enum"] == [s.value for s in Status]
