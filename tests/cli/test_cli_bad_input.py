"""Whatever is wrong with an option or a file: one clear line, exit code 2, nothing touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import SMALL, Rlbench

ONE = ("--only", "fake", "--scenario", "batch", "--skip", "control")
RUN = ("attention", *SMALL, *ONE)
GOOD = {
    "schema": "rlbench.report/1",
    "created": "2026-01-01T00:00:00.000Z",
    "argv": ["rlbench"],
    "rlbench": {"version": "0", "commit": None, "dirty": None},
}


def refused(rlbench: Rlbench, *arguments: str | Path) -> str:
    """The one line that a refused command says; nothing else may have happened."""
    before = rlbench.files()
    done = rlbench(*arguments, code=2)
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("rlbench: ")
    assert rlbench.files() == before
    return lines[0]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--only", "fa5", ["'fa5'", "fa4", "torch-eager", "Did you mean"]),
        ("--only", "torch-sdpa:backend=flush", ["Did you mean 'torch-sdpa:backend=flash'"]),
        ("--skip", "nothing-of-this", ["--skip", "torch-eager"]),
        ("--case", "qwen3-nxt", ["--case", "Did you mean 'qwen3-next'"]),
        ("--scenario", "decoding", ["--scenario", "Did you mean 'decode'", "latency"]),
        ("--pass", "forward", ["--pass", "prefill", "decode", "backward"]),
        ("--dtype", "fp8", ["--dtype", "bf16", "fp16"]),
        ("--preset", "large", ["--preset", "smoke", "default", "full"]),
        ("--device", "gpu", ["--device", "cpu", "cuda:0"]),
        ("--device", "cuda:99", ["--device", "cuda:99"]),
        ("--env", "vllm", ["--env", "NAME=PYTHON"]),
        ("--env", "=python", ["--env", "NAME=PYTHON"]),
        ("--env", "other=/no/such/python", ["--env", "other", "/no/such/python"]),
        ("--env", "other=/", ["--env", "other"]),
        ("--env", "other=/bin/false", ["--env", "other"]),
        ("--env", "other=/bin/true", ["--env", "other"]),
        ("--env", "local=python3", ["--env", "local"]),
    ],
)
def test_an_unknown_name_is_refused(
    option: str, value: str, says: list[str], rlbench: Rlbench
) -> None:
    line = refused(rlbench, *RUN, option, value, "--out", "r.json")
    for words in says:
        assert words in line


def test_two_environments_cannot_share_a_name(rlbench: Rlbench) -> None:
    line = refused(rlbench, *RUN, "--env", "a=python3", "--env", "a=python3")
    assert "twice" in line


def test_skipping_all_that_is_asked_for_is_refused(rlbench: Rlbench) -> None:
    assert "no engine" in refused(rlbench, *RUN, "--skip", "fake")


@pytest.mark.parametrize(
    "arguments",
    [
        ("attention", "--no-such-option"),
        ("attention", "--timeout", "0"),
        ("attention", "--timeout", "soon"),
        ("show", "r.json", "--format", "pdf"),
        ("no-such-command",),
        ("merge", "-o", "x.json"),
    ],
)
def test_a_misspelt_command_line_ends_with_2(arguments: tuple[str, ...], rlbench: Rlbench) -> None:
    done = rlbench(*arguments, code=2)
    assert done.out == ""
    assert done.err


# --- reports that cannot be read --------------------------------------------------------------


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _field(**fields: object) -> Callable[[Path], object]:
    return _text(json.dumps({**GOOD, **fields}))


BAD_REPORTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "truncated": (_text(json.dumps(GOOD, indent=1)[:90]), ["not JSON", "cut off"]),
    "empty": (_text(""), ["not JSON"]),
    "not-json": (_text("Hello, world }"), ["not JSON"]),
    "nan": (_text('{"schema": NaN}'), ["not JSON", "NaN"]),
    "a-list": (_text("[]"), ["not an rlbench report"]),
    "no-schema": (_text('{"results": []}'), ["not an rlbench report"]),
    "other-schema": (_field(schema="rlbench.report/9"), ["rlbench.report/9", "rlbench.report/1"]),
    "schema-number": (_field(schema=1), ["rlbench.report/1"]),
    "wrong-field": (_field(results=[{"op": "attention"}]), ["results.0"]),
    "wrong-type": (_field(results=7), ["results"]),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe\x00{}"), ["cannot be read"]),
    "directory": (lambda path: path.mkdir(), ["is a directory"]),
    "missing": (lambda path: None, ["no such file"]),
    "unreadable": (lambda path: path.symlink_to("/proc/self/mem"), ["cannot be read"]),
    "deep": (_text("[" * 100_000), ["deep.json"]),
}
READERS = {
    "show": ("show", "{}"),
    "merge": ("merge", "{}", "-o", "out.json"),
    "check": ("schema", "--check", "{}"),
    "--merge": (*RUN, "--merge", "{}", "--out", "out.json"),
    "--resume": (*RUN, "--resume", "--out", "{}"),
}


@pytest.mark.parametrize("kind", BAD_REPORTS)
def test_a_bad_report_is_refused_by_name(kind: str, rlbench: Rlbench) -> None:
    make, says = BAD_REPORTS[kind]
    name = f"{kind}.json"
    make(rlbench.folder / name)
    line = refused(rlbench, "show", name)
    for words in (name, *says):
        assert words in line


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_bad_report_and_keeps_it(reader: str, rlbench: Rlbench) -> None:
    bad = rlbench.folder / "bad.json"
    bad.write_text('{"schema": "rlbench.rep')
    line = refused(rlbench, *(word.format("bad.json") for word in READERS[reader]))
    assert "bad.json" in line
    assert bad.read_text() == '{"schema": "rlbench.rep'


# --- places that cannot be written ------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "merge"])
@pytest.mark.parametrize(
    ("out", "says"),
    [("no/such/r.json", "no directory"), (".", "is a directory"), ("/proc/r.json", "/proc")],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    command: str, out: str, says: str, rlbench: Rlbench
) -> None:
    (rlbench.folder / "good.json").write_text(json.dumps(GOOD))
    asked = RUN if command == "run" else ("merge", "good.json")
    assert says in refused(rlbench, *asked, "--out", out)


# --- plug-ins that are broken -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("broken_engine", "raise RuntimeError('not today')"),
        ("broken_engine", "def ("),
        ("broken_engine", "ENGINE = 7"),
        ("broken_engine", None),
        ("no_such_package.engine", None),
    ],
)
def test_a_broken_plugin_is_named(module: str, text: str | None, tmp_path: Path) -> None:
    plugin, folder = tmp_path / "plugin", tmp_path / "work"
    folder.mkdir()
    metadata = plugin / "broken-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[rlbench.engines]\nbroken = {module}\n")
    if text is not None:
        (plugin / "broken_engine.py").write_text(text)
    line = refused(Rlbench(folder, extra={"PYTHONPATH": str(plugin)}), "engines")
    assert "broken" in line


def test_a_plugin_of_the_name_of_an_engine_is_refused(tmp_path: Path) -> None:
    plugin, folder = tmp_path / "plugin", tmp_path / "work"
    folder.mkdir()
    metadata = plugin / "twice-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[rlbench.engines]\ntorch-eager = my_eager\n")
    (plugin / "my_eager.py").write_text("from rlbench.engines.torch_eager import ENGINE\n")
    line = refused(Rlbench(folder, extra={"PYTHONPATH": str(plugin)}), "engines")
    assert "torch-eager" in line
    assert "twice" in line
