"""A run that is stopped leaves a valid report, and `--resume` measures the rest of it."""

from __future__ import annotations

import json
import os
import select
import signal

import pytest
from harness import SMALL, Done, Rlbench, alive, by_key

CALM = {"RLBENCH_FAKE_CALM": "1"}
ASKED = ("--only", "fake", "--only", "fake:hang=call", "--scenario", "batch", "--skip", "control")
RUN = ("attention", *SMALL, *ASKED, "--out", "r.json")


def stop(rlbench: Rlbench, *numbers: signal.Signals) -> Done:
    """Stop a run while its second job hangs."""
    started = rlbench.start(*RUN)
    for _ in started.lines_until("[1/2] fake · tiny · batch"):
        pass
    for number in numbers:
        started.process.send_signal(number)
    return rlbench.finish(started)


def valid(rlbench: Rlbench) -> None:
    """The report is whole, has the first job's result, and is the only file."""
    rlbench("schema", "--check", "r.json", code=0)
    assert set(by_key(rlbench.report("r.json"))) == {("fake", "batch")}
    assert rlbench.files() == ["r.json"]


def test_ctrl_c_leaves_a_valid_report_that_resume_completes(rlbench: Rlbench) -> None:
    done = stop(rlbench, signal.SIGINT)
    assert done.code == 130
    assert "interrupted" in done.err
    assert "--resume" in done.err
    assert alive(done.mark) == []
    valid(rlbench)
    before = by_key(rlbench.report("r.json"))

    done = rlbench(*RUN, "--resume", code=0, **CALM)
    after = by_key(rlbench.report("r.json"))
    assert after["fake", "batch"] == before["fake", "batch"]
    assert after["fake:hang=call", "batch"]["status"] == "unproven"
    assert [line.split()[:2] for line in done.err.splitlines()] == [["[1/1]", "fake:hang=call"]]
    assert rlbench.files() == ["r.json"]
    assert len(rlbench.report("r.json")["runs"]) == 2


def test_a_termination_leaves_a_valid_report_and_a_second_one_changes_nothing(
    rlbench: Rlbench,
) -> None:
    done = stop(rlbench, signal.SIGTERM, signal.SIGINT)
    assert done.code == 130
    assert alive(done.mark) == []
    valid(rlbench)


def test_a_killed_run_leaves_a_valid_report_and_takes_its_workers_along(
    rlbench: Rlbench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fifo = tmp_path_factory.mktemp("hanging") / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    started = rlbench.start(*RUN, RLBENCH_FAKE_HANGING=str(fifo))
    ready, _, _ = select.select([reader], [], [], 120.0)
    os.close(reader)
    assert ready, "the job that hangs never began"
    started.process.kill()
    done = rlbench.finish(started)
    assert done.code == -signal.SIGKILL
    assert alive(done.mark) == []
    valid(rlbench)


# --- resuming ---------------------------------------------------------------------------------


@pytest.fixture
def finished(everything: Done, shared_rlbench: Rlbench) -> str:
    """The text of a report with the control's and the fake engine's answers."""
    return (shared_rlbench.folder / "everything.json").read_text()


def test_resuming_a_finished_run_measures_nothing(finished: str, rlbench: Rlbench) -> None:
    (rlbench.folder / "r.json").write_text(finished)
    asked = ("--only", "fake", "--scenario", "batch", "--out", "r.json", "--resume")
    done = rlbench("attention", *SMALL, *asked, code=0)
    assert done.err == ""
    assert by_key(rlbench.report("r.json")) == by_key(json.loads(finished))


def test_resuming_proves_with_the_control_of_before(finished: str, rlbench: Rlbench) -> None:
    (rlbench.folder / "r.json").write_text(finished)
    asked = ("--only", "fake:chatty", "--scenario", "batch", "--out", "r.json", "--resume")
    done = rlbench("attention", *SMALL, *asked, code=0)
    assert done.err.startswith("[1/1] fake:chatty")
    assert by_key(rlbench.report("r.json"))["fake:chatty", "batch"]["status"] == "pass"


def test_resuming_without_a_report_starts_one(rlbench: Rlbench) -> None:
    asked = ("--only", "fake-absent", "--skip", "control", "--scenario", "batch")
    rlbench("attention", *SMALL, *asked, "--out", "r.json", "--resume", code=3)
    assert len(rlbench.report("r.json")["results"]) == 1


def test_resuming_with_another_preset_is_refused_before_anything_is_measured(
    finished: str, rlbench: Rlbench
) -> None:
    (rlbench.folder / "r.json").write_text(finished)
    asked = ("--case", "tiny", "--device", "cpu", "--preset", "full", "--scenario", "batch")
    more = ("--only", "fake:chatty", "--out", "r.json", "--resume")
    done = rlbench("attention", *asked, *more, code=2)
    assert len(done.err.splitlines()) == 1, done.err
    assert "preset" in done.err
    assert (rlbench.folder / "r.json").read_text() == finished


def test_resuming_on_other_packages_is_refused_before_anything_is_measured(
    finished: str, rlbench: Rlbench
) -> None:
    other = json.loads(finished)
    other["environments"][0]["packages"]["torch"] = "1.0"
    text = json.dumps(other)
    (rlbench.folder / "r.json").write_text(text)
    asked = ("--only", "fake", "--scenario", "batch", "--out", "r.json", "--resume")
    done = rlbench("attention", *SMALL, *asked, code=2)
    assert len(done.err.splitlines()) == 1, done.err
    assert "torch" in done.err
    assert (rlbench.folder / "r.json").read_text() == text


def test_an_engine_that_resolves_otherwise_after_a_resume_loses_no_other_result(
    finished: str, rlbench: Rlbench
) -> None:
    other = json.loads(finished)
    for engine in other["engines"]:
        if engine["id"] == "fake":
            engine["resolved"] = {"splits": "2"}
    other["results"] = [r for r in other["results"] if r["scenario"] != "accuracy"]
    (rlbench.folder / "r.json").write_text(json.dumps(other))
    asked = ("--only", "fake", "--only", "torch-eager", "--out", "r.json", "--resume")
    more = ("--scenario", "batch", "--scenario", "accuracy", "--pass", "prefill")
    rlbench("attention", *SMALL, *asked, *more)
    results = by_key(rlbench.report("r.json"))
    assert results["fake", "batch"]["status"] == "pass"
    assert ("fake", "accuracy") in results
    assert results["torch-eager", "accuracy"]["status"] == "measured"
