"""`--save-outputs` and what `show --outputs` makes of it, across environments."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from harness import SMALL, Done, Rlbench, alive, by_key
from safetensors import safe_open

from rlbench.measure.bits import digest
from rlbench.results.output_files import parts_of

ACCURACY = ("--scenario", "accuracy")
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from rlbench.cli import main
main()
"""


def run(rlbench: Rlbench, *engines: str, code: int | None = 0, **extra: str) -> Done:
    asked = [word for engine in engines for word in ("--only", engine)]
    return rlbench(
        "attention", *SMALL, *asked, *ACCURACY, "--out", "r.json", "--save-outputs", "o",
        code=code, **extra,
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Rlbench:
    """A run of several engines with saved outputs; not to be changed."""
    rlbench = Rlbench(tmp_path_factory.mktemp("saved"))
    done = run(rlbench, "fake", "fake:wrong", "fake:nan", "torch-sdpa:backend=math")
    assert "--outputs o" in done.out
    return rlbench


@pytest.fixture
def copy(saved: Rlbench, tmp_path: Path) -> Rlbench:
    """The same, to be changed."""
    shutil.copytree(saved.folder, tmp_path / "copy")
    return Rlbench(tmp_path / "copy")


def outputs(rlbench: Rlbench) -> dict[str, Path]:
    """Engine -> file."""
    return {parts_of(path.name)[2]: path for path in (rlbench.folder / "o").iterdir()}


def test_every_engine_has_one_file_of_what_the_report_digests(saved: Rlbench) -> None:
    report = saved.report("r.json")
    (case,) = report["cases"]
    results = by_key(report)
    files = outputs(saved)
    assert set(files) == {"fake", "fake:wrong", "fake:nan", "torch-sdpa:backend=math"}
    for engine, path in files.items():
        result = results[engine, "accuracy"]
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {
                "op": "attention",
                "case": "tiny",
                "engine": engine,
                "environment": result["environment"],
                "inputs_sha256": case["inputs_sha256"],
            }
            found = {name: digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        assert found == result["digests"]


def test_a_report_is_the_same_with_saved_outputs(saved: Rlbench) -> None:
    text = (saved.folder / "r.json").read_text()
    assert "not_saved" not in text
    for result in saved.report("r.json")["results"]:
        assert "save-outputs" not in result["command"]


def test_show_has_the_matrix_of_unequal_outputs(saved: Rlbench) -> None:
    done = saved("show", "r.json", "--agreement", "--outputs", "o", code=0, COLUMNS="80")
    assert done.err == ""
    assert all(len(line) <= 80 for line in done.out.splitlines())
    lines = [line.split() for line in done.out.splitlines()]
    at = lines.index(["accuracy", "prefill.out", "150+47"])
    names = ["fake", "fake:nan", "fake:wrong", "torch-sdpa:backend=math"]
    assert lines[at + 1 : at + 5] == [[f"{i + 1}:", name] for i, name in enumerate(names)]
    rows = {row[0]: row[1:] for row in lines[at + 6 : at + 10]}
    assert rows["1"][:3] == ["·", "NaN", "2.0"], "fake:wrong adds the number of sequences"
    assert rows["3"][:3] == ["2.0", "NaN", "·"]
    # In every other output the fakes are all right, and need one entry.
    at = lines.index(["accuracy", "decode.out", "150+47"])
    assert lines[at + 1] == ["1:", "fake", "=", "fake:nan", "=", "fake:wrong"]


def test_markdown_has_it_too(saved: Rlbench) -> None:
    whole = saved("show", "r.json", "--format", "markdown", "--outputs", "o", code=0).out
    alone = saved(
        "show", "r.json", "--agreement", "--format", "markdown", "--outputs", "o", code=0
    ).out
    for text in (whole, alone):
        assert "### How far apart outputs are" in text
        assert re.search(r"^\| 3 \| fake:wrong \| 2\.0 \| NaN \| · \|", text, re.MULTILINE)
    assert "Verdicts" not in alone and "### Error against fp64" not in alone
    plain = saved("show", "r.json", "--format", "markdown", code=0).out
    assert "How far apart" not in plain


def test_two_environments_merge_and_compare(saved: Rlbench, tmp_path: Path) -> None:
    rlbench = Rlbench(tmp_path)
    asked = ("--only", "torch-eager", *ACCURACY, "--skip", "control", "--out", "r.json")
    (tmp_path / "envs.toml").write_text(f'["my: env"]\npython = "{sys.executable}"\n')
    toml = (tmp_path / "envs.toml").read_text()
    (tmp_path / "envs.toml").write_text(toml + 'engines = ["torch-eager"]\n')
    rlbench("attention", *SMALL, *asked, "--envs", "envs.toml", "--save-outputs", "o", code=0)
    (path,) = (tmp_path / "o").iterdir()
    assert parts_of(path.name)[2:] == ("torch-eager", "my: env")
    rlbench("merge", saved.folder / "r.json", "r.json", "-o", "all.json", code=0)
    done = rlbench(
        "show", "all.json", "--agreement", "--outputs", "o", "--outputs", saved.folder / "o", code=0
    )
    assert done.err == ""
    assert "fake = torch-eager" in done.out
    assert "no saved outputs" not in done.out
    done = rlbench("show", "all.json", "--agreement", "--outputs", saved.folder / "o", code=0)
    assert "no saved outputs: torch-eager" in done.out


# --- files that are not what the report measured ------------------------------------------------


def test_a_file_that_is_cut_off_or_another_runs_is_named_and_left_out(copy: Rlbench) -> None:
    files = outputs(copy)
    files["fake"].write_bytes(files["fake"].read_bytes()[:-1])
    shutil.copy(files["fake:wrong"], files["fake:nan"])
    done = copy("show", "r.json", "--agreement", "--outputs", "o", code=0)
    first, second = sorted(done.err.splitlines())
    assert first.startswith("rlbench: o/attention+tiny+fake%3Anan+")
    assert "'fake:wrong'" in first
    assert second.startswith("rlbench: o/attention+tiny+fake+")
    assert "not all of one" in second
    assert "no saved outputs: fake, fake:nan" in done.out
    assert "NaN" not in done.out


def test_a_report_of_other_digests_takes_nothing_of_the_folder(copy: Rlbench) -> None:
    report = copy.report("r.json")
    for result in report["results"]:
        result["digests"] = dict.fromkeys(result["digests"], "0" * 64)
    (copy.folder / "r.json").write_text(json.dumps(report))
    done = copy("show", "r.json", "--agreement", "--outputs", "o", code=0)
    assert len(done.err.splitlines()) == 4
    assert all("another run's" in line for line in done.err.splitlines())
    assert "no saved outputs: fake, fake:nan, fake:wrong, torch-sdpa:backend=math" in done.out


# --- what goes wrong while saving ---------------------------------------------------------------


def test_a_full_disk_costs_no_result(rlbench: Rlbench) -> None:
    started = rlbench.start(
        "attention", *SMALL, "--only", "fake", *ACCURACY, "--out", "r.json",
        "--save-outputs", "o", command=("-c", LIMITED), PYTHONDONTWRITEBYTECODE="1",
    )  # fmt: skip
    done = rlbench.finish(started, code=2)
    assert done.complaints == ["rlbench: the outputs of fake (tiny) were not saved: File too large"]
    assert by_key(rlbench.report("r.json"))["fake", "accuracy"]["status"] == "measured"
    assert list((rlbench.folder / "o").iterdir()) == []


def test_a_worker_that_is_killed_leaves_no_half_file(copy: Rlbench) -> None:
    whole = outputs(copy)["fake"]
    half = whole.with_name(f".{whole.name.replace('fake', 'fake%3Ahang=call')}.abc")
    half.write_bytes(b"half")
    asked = ("--only", "fake:hang=call", *ACCURACY, "--timeout", "3", "--out", "r.json")
    before = whole.read_bytes()
    done = copy("attention", *SMALL, *asked, "--save-outputs", "o", code=4)
    assert alive(done.mark) == []
    assert not half.exists()
    assert whole.read_bytes() == before


def test_resume_measures_and_saves_the_rest(copy: Rlbench) -> None:
    before = by_key(copy.report("r.json"))
    outputs(copy)["fake"].unlink()
    asked = ("--only", "fake", "--only", "torch-eager", *ACCURACY, "--out", "r.json", "--resume")
    done = copy("attention", *SMALL, *asked, "--save-outputs", "o", code=0)
    after = by_key(copy.report("r.json"))
    assert {k: r for k, r in after.items() if k[0] != "torch-eager"} == before
    assert "torch-eager" in outputs(copy)
    # What is not measured again is not saved either, and that is said.
    (line,) = done.complaints
    assert "fake (tiny)" in line and "without --resume" in line


# --- options ------------------------------------------------------------------------------------

RUN = ("attention", *SMALL, "--only", "fake", "--out", "r.json")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*RUN, *ACCURACY, "--save-outputs", "file"), "file is not a directory"),
        ((*RUN, *ACCURACY, "--save-outputs", "file/o"), "file/o is not a directory"),
        ((*RUN, *ACCURACY, "--save-outputs", "/proc/o"), "/proc/o"),
        ((*RUN, "--scenario", "batch", "--save-outputs", "o"), "--scenario leaves it out"),
        (("show", "good.json", "--outputs", "o"), "--agreement"),
        (("show", "good.json", "--agreement", "--format", "csv"), "--format csv"),
        (("show", "good.json", "--agreement", "--outputs", "nowhere"), "nowhere"),
        (("show", "good.json", "--agreement", "--outputs", "file"), "file is not a directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    arguments: tuple[str, ...], says: str, rlbench: Rlbench
) -> None:
    version = {"version": "0", "commit": None, "dirty": None}
    good = {"schema": "rlbench.report/1", "created": "", "argv": [], "rlbench": version}
    (rlbench.folder / "good.json").write_text(json.dumps(good))
    (rlbench.folder / "file").write_text("")
    done = rlbench(*arguments, code=2)
    assert done.out == ""
    (line,) = done.err.splitlines()
    assert says in line
    assert rlbench.files() == ["file", "good.json"]
