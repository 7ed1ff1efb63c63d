"""`rlbench attention` from its options to its report, on the CPU with the fake engine."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from harness import SMALL, Done, Json, Rlbench, alive, by_key, read, settled

from rlbench import discover
from rlbench.cli.exit_code import of_run
from rlbench.plan import make_request
from rlbench.results.schema import Report

FAKE = ("--only", "fake")
EAGER = ("--only", "torch-eager")
BATCH = ("--scenario", "batch")
ACCURACY = ("--scenario", "accuracy")
INVARIANCE = ("batch", "chunked-prefill", "decode", "backward")


@pytest.fixture(scope="module")
def report(everything: Done, shared_rlbench: Rlbench) -> Json:
    return shared_rlbench.report("everything.json")


@pytest.fixture(scope="module")
def halves(report: Json, shared_rlbench: Rlbench) -> tuple[Path, Path, Path]:
    """The reports of both engines in one run, and of each in its own."""
    both, fake, eager = (shared_rlbench.folder / f"{n}.json" for n in ("both", "fake", "eager"))
    for path, engines in ((both, (*FAKE, *EAGER)), (eager, EAGER)):
        shared_rlbench("attention", *SMALL, *engines, *BATCH, *ACCURACY, "--out", path, code=0)
    asked = [r for r in report["results"] if r["scenario"] in {"batch", "accuracy"}]
    fake.write_text(json.dumps({**report, "results": asked}))
    return both, fake, eager


def test_a_right_engine_passes_everything(report: Json) -> None:
    found = {s: r["status"] for (engine, s), r in by_key(report).items() if engine == "fake"}
    assert found == {
        **dict.fromkeys(INVARIANCE, "pass"),
        "accuracy": "measured",
        "latency": "measured",
    }


def test_the_control_runs_unasked_and_fails_every_check(report: Json) -> None:
    results = {s: r for (engine, s), r in by_key(report).items() if engine == "control"}
    assert set(results) == set(INVARIANCE)
    for result in results.values():
        assert result["status"] == "fail"
        assert result["checks"]
        assert not any(check["equal"] for check in result["checks"])


def test_the_report_is_valid_and_says_so(
    everything: Done, report: Json, shared_rlbench: Rlbench
) -> None:
    done = shared_rlbench("schema", "--check", "everything.json", code=0)
    assert done.out.startswith(
        f"everything.json: valid rlbench.report/1 with {len(report['results'])}"
    )


def test_a_reason_stands_exactly_where_nothing_was_measured(report: Json) -> None:
    measured = {"pass", "fail", "unproven", "measured"}
    for result in report["results"]:
        assert ("reason" in result) == (result["status"] not in measured)


def test_a_report_names_no_folder_of_this_machine(
    everything: Done, report: Json, shared_rlbench: Rlbench
) -> None:
    text = (shared_rlbench.folder / "everything.json").read_text()
    folders = {
        str(shared_rlbench.folder),
        str(Path(sys.executable).parent),
        sys.prefix,
        tempfile.gettempdir() + "/",
        str(Path.home()) + "/",
        str(Path(__file__).resolve().parents[2]),
    }
    assert not [folder for folder in folders if folder in text]
    assert report["argv"][-2:] == ["--out", "everything.json"]


def test_progress_is_a_line_a_job(everything: Done) -> None:
    lines = [line for line in everything.err.splitlines() if line.startswith("[")]
    assert [line.split("]")[0] for line in lines] == [f"[{n}/10" for n in range(1, 11)]
    assert lines[0].startswith("[1/10] control · tiny · batch  FAIL 0/")
    assert any(" fake · tiny · decode  pass 9/9 " in line for line in lines)
    assert everything.complaints == []


def test_the_tables_are_printed_and_the_report_named(everything: Done) -> None:
    assert "pass 23/23" in everything.out
    assert "everything.json" in everything.out
    assert "at what price?" in everything.out


def test_nothing_runs_on_when_it_is_over(everything: Done) -> None:
    assert alive(everything.mark) == []


def test_clock_probes_are_taken_before_and_after_latency(report: Json) -> None:
    (environment,) = report["environments"]
    assert sorted((p["engine"], p["when"]) for p in environment["probes"]) == [
        ("fake", "after"),
        ("fake", "before"),
    ]


@pytest.mark.parametrize("form", ["table", "markdown", "csv"])
def test_show_prints_a_report_in_every_format(
    form: str, everything: Done, shared_rlbench: Rlbench
) -> None:
    done = shared_rlbench("show", "everything.json", "--format", form, code=0)
    assert "fake" in done.out
    assert "control" in done.out
    assert done.err == ""


def test_a_table_fits_80_columns(everything: Done, shared_rlbench: Rlbench) -> None:
    done = shared_rlbench("show", "everything.json", code=0, COLUMNS="80")
    assert max(len(line.rstrip()) for line in done.out.splitlines()) <= 80
    assert "pass 12/12" in done.out


# --- splitting, merging -----------------------------------------------------------------------


def test_split_runs_merged_equal_one_run(
    halves: tuple[Path, Path, Path], shared_rlbench: Rlbench
) -> None:
    both, fake, eager = halves
    shared_rlbench("merge", fake, eager, "-o", "merged.json", code=0)
    assert _sorted(settled(shared_rlbench.report("merged.json"))) == _sorted(settled(read(both)))


def test_the_order_of_a_merge_is_of_no_matter(
    halves: tuple[Path, Path, Path], shared_rlbench: Rlbench
) -> None:
    _, fake, eager = halves
    for name, files in (("ab", (fake, eager)), ("ba", (eager, fake)), ("aab", (fake, fake, eager))):
        shared_rlbench("merge", *files, "-o", f"{name}.json", code=0)
    assert shared_rlbench.report("ab.json") == shared_rlbench.report("ba.json")
    assert shared_rlbench.report("ab.json") == shared_rlbench.report("aab.json")


def test_merge_refuses_two_answers_unless_told_which(
    halves: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    rlbench = Rlbench(tmp_path)
    _, fake, _ = halves
    other = read(fake)
    for result in other["results"]:
        if result["scenario"] == "accuracy":
            figures = next(iter(result["errors"].values()))
            figures["max_abs"] *= 2
            result["at"] = "2999-01-01T00:00:00.000Z"
    (tmp_path / "other.json").write_text(json.dumps(other))
    done = rlbench("merge", fake, "other.json", "-o", "all.json", code=2)
    assert len(done.complaints) == 1
    for word in ("fake", "accuracy", str(fake), "other.json", "--on-conflict newest"):
        assert word in done.err
    assert not (tmp_path / "all.json").exists()
    rlbench("merge", fake, "other.json", "-o", "all.json", "--on-conflict", "newest", code=0)
    kept = by_key(rlbench.report("all.json"))["fake", "accuracy"]
    assert kept["at"].startswith("2999")


def test_merge_refuses_other_inputs(halves: tuple[Path, Path, Path], tmp_path: Path) -> None:
    rlbench = Rlbench(tmp_path)
    _, fake, eager = halves
    other = read(eager)
    other["cases"][0]["inputs_sha256"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(other))
    done = rlbench("merge", fake, "other.json", "-o", "all.json", code=2)
    assert len(done.complaints) == 1
    assert "tiny" in done.err
    assert "inputs" in done.err


def test_an_earlier_report_is_folded_in(halves: tuple[Path, Path, Path], rlbench: Rlbench) -> None:
    _, fake, _ = halves
    asked = ("--only", "fake-absent", *BATCH, "--skip", "control", "--merge", fake)
    rlbench("attention", *SMALL, *asked, "--out", "all.json", code=3)
    results = by_key(rlbench.report("all.json"))
    assert results.pop(("fake-absent", "batch"))["status"] == "unavailable"
    assert results == by_key(read(fake))
    assert len(rlbench.report("all.json")["runs"]) == 2


def test_a_results_command_measures_it_again(report: Json, rlbench: Rlbench) -> None:
    wanted = by_key(report)["fake", "batch"]
    program, *arguments = shlex.split(wanted["command"])
    assert program == "rlbench"
    # Without --device and --out: on the machine that measured it, they are not part of the answer.
    rlbench(*arguments, "--device", "cpu", code=0)
    again = by_key(rlbench.report("rlbench-attention.json"))["fake", "batch"]
    assert settled_result(again) == settled_result(wanted)


# --- choosing ---------------------------------------------------------------------------------


def test_a_name_means_all_of_its_options_and_skip_leaves_some_out(rlbench: Rlbench) -> None:
    asked = ("--only", "fa4", "--only", "fa3:splits=1", "--skip", "fa4:deterministic")
    rlbench("attention", *SMALL, *asked, "--skip", "control", *BATCH, "--out", "r.json", code=3)
    assert {r["engine"] for r in rlbench.report("r.json")["results"]} == {"fa4", "fa3:splits=1"}


def test_passes_and_dtypes_narrow_and_widen_every_scenario(rlbench: Rlbench) -> None:
    asked = (*FAKE, "--skip", "control", *ACCURACY, *BATCH, "--out", "r.json")
    more = ("--pass", "decode", "--dtype", "bf16", "--dtype", "fp16")
    rlbench("attention", *SMALL, *asked, *more, code=0)
    report = rlbench.report("r.json")
    assert {c["id"]: c["dtype"] for c in report["cases"]} == {"tiny": "bf16", "tiny:fp16": "fp16"}
    results = {r["case"]: r for r in report["results"]}
    assert set(results) == {"tiny", "tiny:fp16"}
    for result in results.values():
        assert result["scenario"] == "accuracy"
        assert {name.split(".")[0] for name in result["errors"]} == {"decode"}
        assert "--pass decode" in result["command"]
        assert ("--dtype fp16" in result["command"]) == (result["case"] == "tiny:fp16")


# --- exit codes -------------------------------------------------------------------------------


def test_a_broken_claim_ends_with_1_and_is_printed(rlbench: Rlbench) -> None:
    asked = ("--only", "fake:claims", "--skip", "control", *BATCH, "--out", "r.json")
    done = rlbench("attention", *SMALL, *asked, code=1)
    assert by_key(rlbench.report("r.json"))["fake:claims", "batch"]["status"] == "fail"
    assert "claim contradicted" in done.out
    assert "https://fake.example/claims" in done.out
    assert exit_code(rlbench.report("r.json"), "fake:claims") == 1


def exit_code(report: Json, *only: str) -> int:
    request = make_request(discover.ops()["attention"])
    named = dataclasses.replace(request, only=only)
    return of_run(Report.model_validate(report), named)


def test_a_failure_nobody_claimed_against_ends_with_0(report: Json) -> None:
    assert by_key(report)["control", "batch"]["status"] == "fail"
    assert exit_code(report, "fake") == 0


@pytest.mark.parametrize(
    ("status", "only", "code"),
    [
        ("crash", "fake", 4),
        ("timeout", "fake", 4),
        ("error", "fake", 4),
        ("oom", "fake", 0),
        ("unsupported", "fake", 0),
        ("unavailable", "other", 0),
        ("unavailable", "absent", 3),
    ],
)
def test_the_worst_of_a_run_is_its_exit_code(
    status: str, only: str, code: int, report: Json
) -> None:
    like = by_key(report)["fake", "batch"]
    plain = {k: v for k, v in like.items() if k not in {"checks", "skipped", "digests"}}
    other = {**plain, "engine": "absent", "status": status, "reason": "it is so"}
    assert exit_code({**report, "results": [*report["results"], other]}, only) == code


def test_an_engine_asked_for_that_is_not_here_ends_with_3(rlbench: Rlbench) -> None:
    asked = ("--only", "fake-absent", "--skip", "control", *BATCH, "--out", "r.json")
    done = rlbench("attention", *SMALL, *asked, code=3)
    (result,) = rlbench.report("r.json")["results"]
    assert result["status"] == "unavailable"
    assert result["reason"].endswith("; to get it: pip install no-such-library")
    assert "pip install no-such-library" in " ".join(done.out.split())


# --- files ------------------------------------------------------------------------------------


def test_an_earlier_report_of_that_name_is_moved_aside(rlbench: Rlbench) -> None:
    earlier = {"r.json": "mine, not even JSON", "r.2.json": "older"}
    for name, text in earlier.items():
        (rlbench.folder / name).write_text(text)
    asked = ("--only", "fake-absent", "--skip", "control", *BATCH, "--out", "r.json")
    done = rlbench("attention", *SMALL, *asked, code=3)
    assert (rlbench.folder / "r.3.json").read_text() == earlier["r.json"]
    assert (rlbench.folder / "r.2.json").read_text() == earlier["r.2.json"]
    assert rlbench.report("r.json")["schema"] == "rlbench.report/1"
    assert "r.3.json" in done.err
    assert rlbench.files() == ["r.2.json", "r.3.json", "r.json"]


def settled_result(result: Json) -> Json:
    return {k: v for k, v in result.items() if k not in {"seconds", "at"}}


def _sorted(report: Json) -> Json:
    """The lists of a report, as sets."""

    def key(item: Json) -> str:
        return json.dumps(item)

    lists: Iterable[str] = [k for k, v in report.items() if isinstance(v, list)]
    return {**report, **{name: sorted(report[name], key=key) for name in lists}}


def test_file_of_environments_says_where_an_engine_runs(rlbench: Rlbench) -> None:
    (rlbench.folder / "envs.toml").write_text(
        f'[mine]\npython = "{sys.executable}"\nengines = ["torch-eager"]\n', encoding="utf-8"
    )
    asked = ("--only", "torch-eager", "--scenario", "batch", "--envs", "envs.toml")
    rlbench("attention", *SMALL, *asked, "--out", "r.json", code=0)
    homes = {r["engine"]: r["environment"] for r in rlbench.report("r.json")["results"]}
    assert homes["torch-eager"] == "mine"
    assert homes["control"].startswith("local-")
