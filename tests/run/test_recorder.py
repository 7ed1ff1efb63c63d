"""The report on disk is whole after every result, and is what a merge would have written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlbench import discover
from rlbench.plan import Environment, Job, make_plan, make_request
from rlbench.results import store
from rlbench.results.vocabulary import Status
from rlbench.run.recorder import Recorder

RUN = {
    "created": "2026-01-01T00:00:00.000Z",
    "argv": ["rlbench", "attention", '--case="results": []'],
    "rlbench": {"version": "0.1.0", "commit": None, "dirty": None},
}
HERE = Environment(
    "local", "/python", {"python": "3.11.9", "packages": {}, "device": {"name": "a"}}, {}, "cpu"
)
FIELDS = {
    "errors": {"prefill.out": {"max_abs": 0.1, "mean_abs": 0.0, "rel_rms": 0.5, "nonfinite": 0}}
}


def jobs() -> Sequence[Job]:
    request = make_request(discover.ops()["attention"], scenarios=["accuracy"])
    return make_plan(request, [HERE]).jobs


def add(recorder: Recorder, job: Job, status: Status = Status.UNSUPPORTED, **more: Any) -> None:
    recorder.add(
        job, HERE, status, reason="naïve", seconds=0.5, fields={}, inputs_sha256="0" * 64, **more
    )


def on_disk_is_the_report(recorder: Recorder) -> None:
    assert recorder.out.read_text() == store.dump(recorder.report())


def test_file_is_whole_after_every_result(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.json", RUN, "default")
    recorder.save()
    on_disk_is_the_report(recorder)
    for job in reversed(jobs()):
        add(recorder, job)
        on_disk_is_the_report(recorder)
    assert len(store.load(recorder.out).results) == len(jobs()) > 5


def test_resumed_results_stay_and_those_measured_again_are_replaced(tmp_path: Path) -> None:
    first = Recorder(tmp_path / "r.json", RUN, "default")
    for job in jobs()[:4]:
        add(first, job)
    again = Recorder(tmp_path / "r.json", RUN, "default", store.load(first.out))
    add(again, jobs()[1], output="another answer")
    add(again, jobs()[5])
    on_disk_is_the_report(again)
    found = {result.engine: result for result in store.load(again.out).results}
    assert len(found) == 5
    assert found[jobs()[1].variant.id].output == "another answer"


def test_result_that_is_refused_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "r.json", RUN, "default")
    add(recorder, jobs()[0])
    before = recorder.out.read_text()
    with pytest.raises(ValueError, match="disagree"):
        recorder.add(jobs()[1], HERE, Status.MEASURED, reason=None, seconds=0.1, fields={})
    recorder.save()
    assert recorder.out.read_text() == before


def test_saving_one_result_of_many_takes_no_longer_for_the_others(tmp_path: Path) -> None:
    """The parent's own work a result stays below 50 ms in a report of six hundred."""
    job = jobs()[0]
    recorder = Recorder(tmp_path / "r.json", RUN, "default")
    add(recorder, job, output="x" * 4000)
    text = next(iter(recorder._texts.values()))
    recorder._texts |= {(str(i),): text for i in range(600)}
    begin = time.process_time()
    for other in jobs()[1:11]:
        add(recorder, other)
    assert (time.process_time() - begin) / 10 < 0.05
