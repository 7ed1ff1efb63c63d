"""From what was asked and what is there to jobs, each with the command that repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlbench import discover
from rlbench.errors import UsageError
from rlbench.plan import Environment, Plan, make_plan, make_request, reproduce, serving

OP = discover.ops()["attention"]
INVARIANCE = ("batch", "chunked-prefill", "decode", "backward")


def environment(name: str, why_not: Mapping[str, str | None] | None = None) -> Environment:
    return Environment(name, f"/{name}/python", {}, why_not or {}, "cpu")


def plan(*environments: Environment, **asked: Any) -> Plan:
    return make_plan(make_request(OP, **asked), environments or [environment("local")])


def test_plain_request_is_everything_the_op_has() -> None:
    request = make_request(OP)
    assert set(request.engines) == set(serving(OP))
    assert request.engines[0] == "control"
    assert request.scenarios == tuple(OP.scenarios)
    assert request.passes == OP.passes
    assert request.dtypes == ("bf16",)
    assert request.only == ()
    assert [c.id for c in request.cases("cpu")] == ["tiny"]
    assert [c.id for c in request.cases("cuda:3")] == ["qwen3-next", "qwen3-8b"]


@pytest.mark.parametrize(
    ("option", "asked"),
    [
        ("--scenario", {"scenarios": ["bach"]}),
        ("--pass", {"passes": ["decod"]}),
        ("--case", {"cases": ["qwen3"]}),
        ("--dtype", {"dtypes": ["fp32"]}),
        ("--preset", {"preset": "large"}),
        ("--only", {"only": ["fa5"]}),
        ("--skip", {"skip": ["fa5"]}),
    ],
)
def test_unknown_names_are_listed_under_their_option(option: str, asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=rf"^{option}: .* is not known\..*Known: "):
        make_request(OP, **asked)


def test_control_is_implied_and_runs_first() -> None:
    assert make_request(OP, only=["torch-eager"]).engines == ("control", "torch-eager")
    assert make_request(OP, only=["torch-eager", "control"]).engines == ("control", "torch-eager")
    assert make_request(OP, only=["torch-eager"]).only == ("torch-eager",)
    assert make_request(OP, only=["torch-eager"], skip=["control"]).engines == ("torch-eager",)


def test_skip_takes_away_from_only() -> None:
    found = make_request(OP, only=["torch-sdpa"], skip=["torch-sdpa:backend=math"]).engines
    assert "torch-sdpa:backend=math" not in found
    assert len(found) == 4
    with pytest.raises(UsageError, match="leave no engine"):
        make_request(OP, only=["torch-eager"], skip=["torch-eager"])


def test_request_keeps_the_ops_order_and_drops_repeats() -> None:
    request = make_request(
        OP,
        scenarios=["decode", "batch", "decode"],
        passes=["backward", "prefill", "decode"],
        cases=["qwen3-8b", "tiny", "qwen3-8b"],
        dtypes=["fp16", "bf16", "fp16"],
    )
    assert request.scenarios == ("batch", "decode")
    assert request.passes == ("prefill", "decode", "backward")
    assert [c.id for c in request.cases("cpu")] == [
        "qwen3-8b:fp16",
        "qwen3-8b",
        "tiny:fp16",
        "tiny",
    ]


def test_control_is_asked_invariance_only() -> None:
    jobs = plan(only=["torch-eager"]).jobs
    by_engine = {
        e: [j.scenario for j in jobs if j.variant.id == e] for e in ("control", "torch-eager")
    }
    assert by_engine["control"] == list(INVARIANCE)
    assert by_engine["torch-eager"] == [*INVARIANCE, "accuracy", "latency"]
    assert [j.variant.id for j in jobs] == ["control"] * 4 + ["torch-eager"] * 6


def test_keys_are_unique() -> None:
    jobs = plan(cases=["tiny", "qwen3-8b"], dtypes=["bf16", "fp16"]).jobs
    assert len({j.key for j in jobs}) == len(jobs)


def test_engine_goes_to_the_first_environment_that_has_it() -> None:
    no = "module x is not installed"
    a = environment("a", {"torch-eager": None, "fa4": no, "fa3": no})
    b = environment("b", {"torch-eager": None, "fa4": None, "fa3": no})
    c = environment("c", {"torch-eager": None, "fa4": None, "fa3": None})
    made = plan(a, b, c, only=["torch-eager", "fa4", "fa3"], skip=["control"], scenarios=["batch"])
    assert {j.variant.name: j.environment for j in made.jobs} == {
        "torch-eager": "a",
        "fa4": "b",
        "fa3": "c",
    }
    assert made.unavailable == []
    assert set(made.environments) == {"a", "b", "c"}


def test_engine_that_runs_nowhere_is_unavailable_with_each_reason() -> None:
    a, b = environment("a", {"fa3": "no module"}), environment("b", {"fa3": "no module"})
    made = plan(a, b, only=["fa3:splits=1"], skip=["control"], scenarios=["batch", "accuracy"])
    assert made.jobs == []
    assert [(j.environment, j.scenario, why) for j, why in made.unavailable] == [
        ("a", "batch", "no module"),
        ("a", "accuracy", "no module"),
    ]
    b = environment("b", {"fa3": "needs compute capability 9.0"})
    (one,) = plan(a, b, only=["fa3:splits=1"], skip=["control"], scenarios=["batch"]).unavailable
    assert one[1] == "a: no module; b: needs compute capability 9.0"


def test_pass_filters_the_scenarios_that_do_not_exercise_it() -> None:
    made = plan(only=["torch-eager"], skip=["control"], passes=["decode"])
    assert [(j.scenario, j.passes) for j in made.jobs] == [
        ("decode", ("decode",)),
        ("accuracy", ("decode",)),
        ("latency", ("decode",)),
    ]


def test_pass_that_no_asked_scenario_exercises_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"--pass backward.*--scenario batch"):
        make_request(OP, scenarios=["batch"], passes=["backward"])


@pytest.mark.parametrize(
    ("asked", "case", "dtype", "scenario", "command"),
    [
        ({}, "tiny", "bf16", "batch", "--case tiny --scenario batch"),
        ({}, "tiny", "fp16", "batch", "--case tiny --scenario batch --dtype fp16"),
        (
            {"preset": "smoke"},
            "qwen3-8b",
            "bf16",
            "latency",
            "--case qwen3-8b --scenario latency --preset smoke",
        ),
        (
            {"passes": ["decode"]},
            "tiny",
            "bf16",
            "accuracy",
            "--case tiny --scenario accuracy --pass decode",
        ),
        ({"passes": ["decode"]}, "tiny", "bf16", "decode", "--case tiny --scenario decode"),
        (
            {"passes": ["backward", "prefill"], "preset": "full"},
            "tiny",
            "fp16",
            "latency",
            "--case tiny --scenario latency --dtype fp16 --preset full --pass prefill --pass backward",
        ),
    ],
)
def test_command_measures_the_result_again(
    asked: dict[str, Any], case: str, dtype: str, scenario: str, command: str
) -> None:
    request = make_request(OP, **asked)
    found = reproduce(request, "fa2:splits=1", OP.case(case, dtype), scenario)
    assert found == f"rlbench attention --only fa2:splits=1 {command}"


@pytest.mark.parametrize("passes", [(), ("decode",), ("prefill", "backward")])
@pytest.mark.parametrize("dtypes", [(), ("fp16",)])
def test_command_of_every_job_asks_for_that_job(
    passes: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    asked: dict[str, Any] = {"passes": passes, "dtypes": dtypes, "preset": "smoke"}
    for job in plan(only=["torch-eager"], skip=["control"], **asked).jobs:
        words = job.command.split()[2:]
        pairs = list(zip(words[::2], words[1::2], strict=True))
        given = {o: [v for k, v in pairs if k == o] for o, _ in pairs}
        again = plan(
            only=given["--only"],
            skip=["control"],
            scenarios=given["--scenario"],
            cases=given["--case"],
            passes=given.get("--pass", []),
            dtypes=given.get("--dtype", []),
            preset=given["--preset"][0],
        )
        assert [(j.key, j.passes) for j in again.jobs] == [(job.key, job.passes)]


def test_engine_goes_where_it_was_told_to_and_nowhere_else() -> None:
    told = Environment("told", "/told/python", {}, {}, "cpu", ("torch-eager",))
    made = plan(environment("local"), told)
    homes = {job.variant.id: job.environment for job in made.jobs}
    assert homes["torch-eager"] == "told"
    assert homes["torch-sdpa:backend=math"] == "local"
    assert "told" not in {home for engine, home in homes.items() if engine != "torch-eager"}


def test_first_of_several_that_are_told_to_and_can() -> None:
    def told(name: str, why_not: str | None = None) -> Environment:
        facts = {"torch-eager": why_not}
        return Environment(name, f"/{name}/python", {}, facts, "cpu", ("torch-eager",))

    made = plan(environment("local"), told("a", "is broken"), told("b"), told("c"))
    assert {j.environment for j in made.jobs if j.variant.id == "torch-eager"} == {"b"}


def test_control_runs_where_others_are_told_to_if_it_can_run_nowhere_else() -> None:
    no = {"control": "no such device", "torch-eager": "no such device"}
    told = Environment("told", "/told/python", {}, {}, "cpu", ("fa4",))
    made = plan(environment("local", no), told, only=["fa4", "torch-eager"])
    assert {j.variant.id: j.environment for j in made.jobs} == {"control": "told", "fa4": "told"}
    assert {job.variant.id for job, _ in made.unavailable} == {"torch-eager"}
    made = plan(told, environment("free"), only=["fa4"])
    assert {j.variant.id: j.environment for j in made.jobs} == {"control": "free", "fa4": "told"}


def test_engine_that_cannot_run_where_it_was_told_to_says_why() -> None:
    told = Environment(
        "told", "/t/python", {}, {"torch-eager": "is broken"}, "cpu", ("torch-eager",)
    )
    made = plan(environment("local"), told, only=["torch-eager"])
    assert {reason for _, reason in made.unavailable} == {"is broken"}
    alone = Environment("alone", "/a/python", {}, {}, "cpu", ("control",))
    (reason,) = {reason for _, reason in plan(alone, only=["torch-eager"]).unavailable}
    assert reason == "is told to run only control"
