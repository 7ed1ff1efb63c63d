"""Engines in other interpreters, where neither rlbench nor what it needs is installed."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import interpreters
import pytest
from harness import PLUGIN, SMALL, Rlbench, alive, by_key

import rlbench.engines
import rlbench.ops
import rlbench.scenarios
from rlbench.run.process import WorkerProcess, command, run_module

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PACKAGES = (rlbench.engines, rlbench.ops, rlbench.scenarios)
MODULES = [
    "rlbench.run.worker",
    "rlbench.run.inspect_environment",
    "rlbench.engines._engine",
    "rlbench.ops._op",
    *(
        f"{package.__name__}.{module.name}"
        for package in PACKAGES
        for module in pkgutil.iter_modules(package.__path__)
        if package is rlbench.scenarios or not module.name.startswith("_")
    ),
]
BATCH = ("--scenario", "batch")


@pytest.fixture(scope="session")
def with_torch_only(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with torch and the library of the engine `fake-away`, and nothing of ours."""
    folder = tmp_path_factory.mktemp("away") / "environment"
    try:
        python = interpreters.make(folder, ["torch"])
    except (LookupError, OSError, subprocess.SubprocessError) as why:
        pytest.skip(f"no interpreter with torch only: {why}")
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "rlbench_fake_home.py").write_text('NAME = "away"\n')
    question = (
        "import torch, importlib.util as u; print(u.find_spec('rlbench'), u.find_spec('rich'))"
    )
    done = subprocess.run(
        [python, "-I", "-c", question], capture_output=True, text=True, check=False
    )
    if done.stdout.split() != ["None", "None"]:
        pytest.skip(f"that interpreter is not as it should be: {done.stdout}{done.stderr}")
    return python


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with rlbench and what it needs, except torch."""
    folder = tmp_path_factory.mktemp("light") / "environment"
    try:
        return interpreters.make(folder, ["typer", "rich", "pydantic"], rlbench=True)
    except (LookupError, OSError, subprocess.SubprocessError) as why:
        pytest.skip(f"no interpreter without torch: {why}")


def test_an_engine_is_measured_where_it_imports(rlbench: Rlbench, with_torch_only: str) -> None:
    done = rlbench(
        *("attention", *SMALL, *BATCH, "--only", "fake-away", "--only", "fake"),
        *("--env", f"away={with_torch_only}", "--out", "r.json"),
        code=0,
    )
    report = rlbench.report("r.json")
    results = by_key(report)
    assert {key: r["status"] for key, r in results.items()} == {
        ("control", "batch"): "fail",
        ("fake", "batch"): "pass",
        ("fake-away", "batch"): "pass",
    }
    homes = {engine: r["environment"] for (engine, _), r in results.items()}
    assert homes["fake-away"] == "away"
    assert homes["fake"] == homes["control"] != "away"
    resolved = {e["id"]: e["resolved"] for e in report["engines"]}
    assert resolved["fake-away"] == {"home": "away", "sees": "nothing"}
    packages = {e["id"]: set(e["packages"]) for e in report["environments"]}
    assert "torch" in packages["away"]
    assert "rlbench" not in packages["away"]
    assert str(Path(with_torch_only).parent) not in (rlbench.folder / "r.json").read_text()
    assert alive(done.mark) == []


def test_a_parent_without_torch_measures_in_another_interpreter(
    tmp_path: Path, with_torch_only: str, without_torch: str
) -> None:
    light = Rlbench(tmp_path, without_torch)
    light(
        *("attention", *SMALL, *BATCH, "--only", "fake"),
        *("--env", f"away={with_torch_only}", "--out", "r.json"),
        code=0,
    )
    report = light.report("r.json")
    assert {r["environment"] for r in report["results"]} == {"away"}
    assert by_key(report)["fake", "batch"]["status"] == "pass"


def test_without_torch_anywhere_nothing_can_be_measured(tmp_path: Path, without_torch: str) -> None:
    done = Rlbench(tmp_path, without_torch)("attention", *SMALL, "--out", "r.json", code=2)
    assert len(done.complaints) == 1
    assert "torch" in done.err
    assert "--env" in done.err
    assert not (tmp_path / "r.json").exists()


def test_an_environment_without_torch_is_named(rlbench: Rlbench, without_torch: str) -> None:
    done = rlbench("attention", *SMALL, "--env", f"light={without_torch}", code=2)
    assert len(done.complaints) == 1
    assert "light" in done.err
    assert "torch" in done.err


def test_the_environments_package_and_command_line_are_all_that_a_parent_without_torch_needs(
    tmp_path: Path, without_torch: str
) -> None:
    done = Rlbench(tmp_path, without_torch)("engines", code=0)
    assert "torch-eager" in done.out


def _interpreter(version: str) -> str:
    found = interpreters.python(version)
    if found is None:
        pytest.skip(f"there is no python{version} here")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_what_runs_in_a_worker_imports_without_torch(version: str, tmp_path: Path) -> None:
    runner = tmp_path / "import_all.py"
    runner.write_text(
        "import importlib, importlib.util, sys\n"
        "def main(names):\n"
        "    for name in names:\n"
        "        importlib.import_module(name)\n"
        "    assert importlib.util.find_spec('torch') is None\n"
        "    light = {'torch', 'typer', 'rich', 'pydantic'}\n"
        "    assert not light & set(sys.modules)\n"
        "    print(len(names))\n"
    )
    start, _, *rest = command(_interpreter(version), "import_all", *MODULES)
    script = rest[0].replace("import importlib.util, sys", "import importlib.util, sys", 1)
    script = script.replace("sys.path[:]", f"sys.path.append({str(tmp_path)!r}); sys.path[:]", 1)
    done = subprocess.run(
        [start, "-I", "-S", "-c", script, *rest[1:]], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{len(MODULES)}\n", done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_an_interpreter_without_torch_says_so(version: str) -> None:
    question = json.dumps(
        {
            "torch-eager": ["rlbench.engines.torch_eager", None],
            "fake": ["rlbench_fake", str(PLUGIN / "rlbench_fake.py")],
        }
    )
    asked = command(_interpreter(version), "rlbench.run.inspect_environment", "auto", question)
    done = subprocess.run(
        [asked[0], "-I", "-S", *asked[1:]], capture_output=True, text=True, check=True
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert "torch" in facts["no_torch"]
    assert facts["python"].startswith(f"{version}.")


ENGINE_THAT_LOOKS_ROUND = """
import platform
from rlbench.engines._engine import Engine
from rlbench.errors import Unsupported

def load_attention(options, device):
    import looked_for
    raise Unsupported(f"{looked_for.NAME} under {platform.python_version()}")

ENGINE = Engine(
    summary="", distribution="looked-for", modules=("torch", "looked_for"), install="",
    load={"attention": load_attention}, devices=("cpu",),
)
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_serves_as_a_worker(version: str, tmp_path: Path) -> None:
    python, site = interpreters.bare(tmp_path / "environment", _interpreter(version))
    interpreters.package(site, "torch", "9.0", torch=interpreters.TORCH)
    interpreters.package(site, "looked-for", "2.0", looked_for="NAME = 'found'")
    engine = tmp_path / "rlbench_looks_round.py"
    engine.write_text(ENGINE_THAT_LOOKS_ROUND)
    question = json.dumps({"looks-round": [engine.stem, str(engine)]})
    asked = ("rlbench.run.inspect_environment", "auto", question)
    facts = json.loads(run_module(python, *asked, timeout_s=60.0).splitlines()[-1])
    assert facts["python"].startswith(f"{version}.")
    assert facts["packages"] == {"looked-for": "2.0", "torch": "9.0"}
    assert facts["why_not"] == {"looks-round": None}

    source = {"name": "looks-round", "module": engine.stem, "file": str(engine), "options": {}}
    set_up = {"engine": source, "op": "attention", "device": "cpu", "preset": "smoke"}
    worker = WorkerProcess(python, set_up)
    worker.channel.send({"do": "import"})
    assert worker.channel.receive(60.0) == {"is": "imported"}
    case = {"name": "tiny", "dtype": "bf16"}
    worker.channel.send({"do": "measure", "case": case, "scenario": "batch", "passes": []})
    answer = worker.channel.receive(60.0)
    worker.close()
    assert answer is not None
    assert (answer["status"], answer["reason"]) == (
        "unsupported",
        f"found under {facts['python']}",
    )


def test_the_running_interpreter_is_among_the_versions_tested() -> None:
    assert interpreters.python(f"{sys.version_info[0]}.{sys.version_info[1]}")
