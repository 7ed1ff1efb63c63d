"""Whatever an engine does to its worker costs one result, and the rest is measured as ever."""

from __future__ import annotations

import re

import pytest
from harness import SMALL, Done, Json, Rlbench, alive, by_key

WRECKS = {
    # engine: (status of its batch result, its reason, what its output shows)
    "fake:die=exit": ("crash", "the worker ended with exit code 3", "these are the last words"),
    "fake:die=signal": ("crash", "the worker was killed by SIGKILL", None),
    "fake:die=segv": ("crash", "the worker was killed by SIGSEGV", None),
    "fake:raise=error": ("error", "RuntimeError: launch failed in kernel.cu", None),
    "fake:raise=exit": ("error", "SystemExit: 0", None),
    "fake:oom=device": ("oom", "CUDA out of memory", None),
    "fake:pipe=closed": ("crash", "", None),
    "fake:pipe=nonsense": ("crash", "", None),
    "fake:unsupported": ("unsupported", "has no ragged prefill", None),
}
UNHARMED = ("fake", "fake:chatty", "fake:grandchild", "fake:lingers")
WRONG = ("fake:wrong", "fake:claims", "fake:nan", "fake:nothing")
TIMEOUT_S = 20


def only(*engines: str) -> list[str]:
    return [word for engine in engines for word in ("--only", engine)]


def scenarios(*names: str) -> list[str]:
    return [word for name in names for word in ("--scenario", name)]


@pytest.fixture(scope="module")
def runs(shared_rlbench: Rlbench) -> dict[str, Done]:
    """Four runs beside one another, for two of them mostly wait."""
    patience = ["--timeout", str(TIMEOUT_S), "--skip", "control"]
    asked = {
        "wrecks": [*only(*WRECKS, *WRONG, *UNHARMED), *scenarios("batch", "decode")],
        "hangs": [
            *only("fake:hang=call", "fake:die=forked", "fake:missing=library", "fake"),
            *scenarios("batch", "decode"),
            *patience,
        ],
        "twins": [
            *only("fake-stuck", "fake:twin=hang", "fake"),
            *scenarios("backward"),
            *patience,
        ],
    }
    # Without that patience: on a busy machine a death can take longer to come about.
    asked["death"] = [*only("fake:twin=die"), *scenarios("backward"), "--skip", "control"]
    started = {
        name: shared_rlbench.start("attention", *SMALL, *arguments, "--out", f"{name}.json")
        for name, arguments in asked.items()
    }
    return {name: shared_rlbench.finish(process) for name, process in started.items()}


@pytest.fixture(scope="module")
def wrecks(runs: dict[str, Done], shared_rlbench: Rlbench) -> dict[tuple[str, str], Json]:
    return by_key(shared_rlbench.report("wrecks.json"))


@pytest.fixture(scope="module")
def hangs(runs: dict[str, Done], shared_rlbench: Rlbench) -> dict[tuple[str, str], Json]:
    return by_key(shared_rlbench.report("hangs.json"))


@pytest.fixture(scope="module")
def twins(runs: dict[str, Done], shared_rlbench: Rlbench) -> dict[tuple[str, str], Json]:
    return by_key(shared_rlbench.report("twins.json"))


@pytest.mark.parametrize("engine", WRECKS)
def test_a_broken_job_is_recorded_with_its_reason(
    engine: str, wrecks: dict[tuple[str, str], Json]
) -> None:
    status, reason, output = WRECKS[engine]
    result = wrecks[engine, "batch"]
    assert result["status"] == status
    assert re.search(reason, result["reason"])
    assert not {"checks", "errors", "points"} & set(result)
    if output:
        assert output in result["output"]


@pytest.mark.parametrize("engine", WRECKS)
def test_a_broken_job_costs_the_next_one_nothing(
    engine: str, wrecks: dict[tuple[str, str], Json]
) -> None:
    assert wrecks[engine, "decode"]["status"] == "pass"


@pytest.mark.parametrize("engine", UNHARMED)
def test_what_an_engine_prints_or_leaves_running_costs_nothing(
    engine: str, wrecks: dict[tuple[str, str], Json]
) -> None:
    assert {wrecks[engine, s]["status"] for s in ("batch", "decode")} == {"pass"}


def test_every_job_has_exactly_one_result(wrecks: dict[tuple[str, str], Json]) -> None:
    engines = {"control", *WRECKS, *WRONG, *UNHARMED}
    assert set(wrecks) == {(engine, s) for engine in engines for s in ("batch", "decode")}


def test_an_answer_that_follows_the_batch_fails(wrecks: dict[tuple[str, str], Json]) -> None:
    result = wrecks["fake:wrong", "batch"]
    assert result["status"] == "fail"
    differing = {c["variation"] for c in result["checks"] if not c["equal"]}
    assert "first of 2" in differing
    assert "alone, then 37 rows of padding" not in differing


def test_equal_nans_are_equal_and_reported(
    wrecks: dict[tuple[str, str], Json], runs: dict[str, Done]
) -> None:
    result = wrecks["fake:nan", "batch"]
    assert result["status"] == "pass"
    packed = [check for check in result["checks"] if "× prefill" in check["exercised"]]
    assert packed
    assert all(check["nans"] > 0 for check in packed)
    assert "NaN" in runs["wrecks"].out


def test_no_output_at_all_is_no_pass(wrecks: dict[tuple[str, str], Json]) -> None:
    assert wrecks["fake:nothing", "batch"]["status"] == "error"


def test_an_output_tail_holds_the_last_lines_and_no_folder(
    wrecks: dict[tuple[str, str], Json],
) -> None:
    output = wrecks["fake:die=exit", "batch"]["output"]
    assert output.splitlines()[-2:] == ["kernel.cu: warning", "fake: these are the last words"]
    assert len(output) < 2000
    assert "/srv" not in output


def test_a_run_with_broken_jobs_ends_with_4(runs: dict[str, Done]) -> None:
    assert runs["wrecks"].code == runs["twins"].code == 4


def test_a_library_that_does_not_load_is_unavailable_and_the_run_ends_with_3(
    hangs: dict[tuple[str, str], Json], runs: dict[str, Done]
) -> None:
    for scenario in ("batch", "decode"):
        result = hangs["fake:missing=library", scenario]
        assert result["status"] == "unavailable"
        assert "libfake.so.1" in result["reason"]
        assert result["reason"].endswith("to get it: nothing brings it")
    assert runs["hangs"].code == 3


@pytest.mark.parametrize("name", ["wrecks", "hangs", "twins", "death"])
def test_no_process_outlives_the_run(name: str, runs: dict[str, Done]) -> None:
    assert alive(runs[name].mark) == []


def test_a_job_that_hangs_is_a_timeout(hangs: dict[tuple[str, str], Json]) -> None:
    result = hangs["fake:hang=call", "batch"]
    assert result["status"] == "timeout"
    assert f"{TIMEOUT_S} s" in result["reason"]
    assert "--timeout" in result["reason"]
    assert TIMEOUT_S <= result["seconds"] < TIMEOUT_S + 5


@pytest.mark.parametrize("engine", ["fake:hang=call", "fake:die=forked", "fake"])
def test_a_timeout_costs_one_result(engine: str, hangs: dict[tuple[str, str], Json]) -> None:
    assert hangs[engine, "decode"]["status"] == "unproven"


def test_a_death_is_seen_though_a_forked_child_holds_the_pipe(
    hangs: dict[tuple[str, str], Json],
) -> None:
    result = hangs["fake:die=forked", "batch"]
    assert result["status"] == "crash"
    assert "exit code 3" in result["reason"]


def test_an_import_that_hangs_is_a_timeout(twins: dict[tuple[str, str], Json]) -> None:
    result = twins["fake-stuck", "backward"]
    assert result["status"] == "timeout"
    assert "--timeout" in result["reason"]


def test_a_fresh_process_that_hangs_is_a_timeout(twins: dict[tuple[str, str], Json]) -> None:
    assert twins["fake:twin=hang", "backward"]["status"] == "timeout"


def test_a_fresh_process_that_dies_is_an_error(
    runs: dict[str, Done], shared_rlbench: Rlbench
) -> None:
    result = by_key(shared_rlbench.report("death.json"))["fake:twin=die", "backward"]
    assert result["status"] == "error"
    assert "fresh process" in result["reason"]
    assert "exit code 5" in result["reason"]


def test_the_engine_after_a_stuck_one_is_measured(twins: dict[tuple[str, str], Json]) -> None:
    result = twins["fake", "backward"]
    assert result["status"] == "unproven"
    assert all(check["equal"] for check in result["checks"])


def test_an_engine_that_writes_into_the_workers_pipe_loses_its_own_result_only(
    rlbench: Rlbench,
) -> None:
    liars = ("fake:pipe=no-status", "fake:pipe=other-status", "fake:pipe=no-checks")
    asked = [*only(*liars, "fake"), *scenarios("batch"), "--skip", "control"]
    done = rlbench("attention", *SMALL, *asked, "--out", "r.json", code=4)
    results = by_key(rlbench.report("r.json"))
    assert {results[liar, "batch"]["status"] for liar in liars} <= {"crash", "error"}
    assert results["fake", "batch"]["status"] == "unproven"
    assert alive(done.mark) == []


def test_an_engine_that_resolves_to_a_number_loses_no_other_result(rlbench: Rlbench) -> None:
    asked = [*only("fake:number", "fake"), *scenarios("batch"), "--skip", "control"]
    rlbench("attention", *SMALL, *asked, "--out", "r.json")
    results = by_key(rlbench.report("r.json"))
    assert results["fake", "batch"]["status"] == "unproven"
    assert ("fake:number", "batch") in results
