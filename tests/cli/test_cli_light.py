"""What answers at once: help, the list of engines, the schema; none of it imports torch."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
from harness import PLUGIN, SMALL, Done, Rlbench, by_key

NOT_LOADED = """
import atexit, os, sys
def check():
    loaded = {"torch", "numpy", "vllm", "cuda"} & set(sys.modules)
    if loaded:
        print("loaded:", loaded, file=sys.stderr)
        sys.stderr.flush()
        os._exit(99)
atexit.register(check)
from rlbench.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("-h",),
        ("--version",),
        ("attention", "--help"),
        ("engines",),
        ("schema",),
        ("env", "create", "--help"),
        ("env", "create", "no-such-engine"),
        ("attention", "--only", "no-such-engine"),
    ],
)
def test_torch_is_not_imported(arguments: tuple[str, ...], rlbench: Rlbench) -> None:
    started = rlbench.start(*arguments, command=("-c", NOT_LOADED))
    done = rlbench.finish(started)
    assert done.code == (2 if "no-such-engine" in arguments else 0), done.err


def test_without_the_control_nothing_is_proven_and_no_parent_imports_torch(
    rlbench: Rlbench,
) -> None:
    asked = ("--only", "fake", "--skip", "control", "--scenario", "batch", "--out", "r.json")
    started = rlbench.start("attention", *SMALL, *asked, command=("-c", NOT_LOADED))
    done = rlbench.finish(started, code=0)
    results = by_key(rlbench.report("r.json"))
    assert {key: r["status"] for key, r in results.items()} == {("fake", "batch"): "unproven"}
    assert "unproven 23/23" in done.out


def test_agreement_by_digests_alone_imports_no_torch(
    everything: Done, shared_rlbench: Rlbench
) -> None:
    asked = ("show", "everything.json", "--agreement")
    started = shared_rlbench.start(*asked, command=("-c", NOT_LOADED))
    done = shared_rlbench.finish(started, code=0)
    assert "accuracy prefill.out" in done.out


def test_help_names_every_command(rlbench: Rlbench) -> None:
    done = rlbench("--help", code=0)
    for command in ("attention", "merge", "show", "engines", "schema", "env", "--version"):
        assert command in done.out


def test_help_of_a_run_names_every_option(rlbench: Rlbench) -> None:
    done = rlbench("attention", "--help", code=0)
    for option in (
        *("--only", "--skip", "--scenario", "--case", "--pass", "--dtype", "--preset", "--device"),
        *("--env", "--merge", "--out", "--resume", "--save-outputs", "--timeout"),
    ):
        assert option in done.out


def test_engines_lists_plugins_beside_our_own(rlbench: Rlbench) -> None:
    done = rlbench("engines", code=0)
    for engine in ("torch-eager", "control", "fa4", "fa3:splits=1", "fake", "fake:die=exit"):
        assert re.search(rf"^{engine}  (here|not here)  ", done.out, re.MULTILINE), engine
    assert "pip install no-such-library" in done.out
    assert "rlbench env create vllm" in done.out
    assert "claims batch_invariant: https://fake.example/claims" in done.out


def test_a_plugin_is_an_installed_distribution() -> None:
    question = """if True:
        from importlib.metadata import entry_points
        print([point.name for point in entry_points(group="rlbench.engines")])
    """
    done = subprocess.run(
        [sys.executable, "-c", question],
        env={**os.environ, "PYTHONPATH": str(PLUGIN)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "'fake'" in done.stdout


def test_a_reader_that_has_gone_is_no_error(rlbench: Rlbench) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "rlbench", "schema"],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=rlbench.folder,
        check=False,
    )
    os.close(writing)
    assert done.stderr == b""
    assert done.returncode == 0


def test_a_terminal_shows_what_runs_and_keeps_the_verdicts(rlbench: Rlbench) -> None:
    terminal, side = pty.openpty()
    asked = ("--only", "fake", "--scenario", "batch", "--skip", "control", "--out", "r.json")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlbench", "attention", *SMALL, *asked],
        stdout=subprocess.DEVNULL,
        stderr=side,
        cwd=rlbench.folder,
        env={**rlbench.environment("", {}), "TERM": "xterm-256color", "COLUMNS": "100"},
    )
    os.close(side)
    shown = b""
    try:
        while data := os.read(terminal, 4096):
            shown += data
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(terminal)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "fake · tiny · batch  unproven 23/23" in text
    assert "0/1" in text
    assert re.search(r"1/1 \S+ fake · tiny · batch: \w", text)


# --- the schema -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema(shared_rlbench: Rlbench) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(shared_rlbench("schema", code=0).out)
    return document


WORDS = {"object", "array", "string", "number", "integer", "boolean", "null"}


def test_the_schema_is_json_schema(schema: dict[str, Any]) -> None:
    assert schema["type"] == "object"
    for node in nodes(schema):
        if "$ref" in node:
            assert node["$ref"].removeprefix("#/$defs/") in schema["$defs"]
        assert node.get("type", "object") in WORDS
        assert set(node.get("required", ())) <= set(
            node.get("properties", node.get("required", ()))
        )


def test_the_schema_keeps_fields_it_does_not_know(schema: dict[str, Any]) -> None:
    for node in nodes(schema):
        if "properties" in node:
            assert node.get("additionalProperties", True)


def test_a_report_fits_the_schema_and_a_wrong_one_does_not(
    schema: dict[str, Any], everything: Done, shared_rlbench: Rlbench
) -> None:
    report = shared_rlbench.report("everything.json")
    assert problems(report, schema, schema) == []
    report["results"][0]["status"] = "splendid"
    report["results"][1].pop("command")
    report["cases"][0]["inputs_sha256"] = "short"
    report["schema"] = "rlbench.report/2"
    assert len(problems(report, schema, schema)) == 4


def nodes(schema: Any) -> list[dict[str, Any]]:
    """Every subschema."""
    if isinstance(schema, list):
        return [node for item in schema for node in nodes(item)]
    if not isinstance(schema, dict):
        return []
    found = [schema] if {"type", "$ref", "anyOf", "enum", "const"} & set(schema) else []
    inner = [
        child
        for word, value in schema.items()
        for child in (list(value.values()) if word in {"properties", "$defs"} else [value])
        if word not in {"default", "enum", "const", "required", "description", "title"}
    ]
    return found + nodes(inner)


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def problems(value: Any, schema: Any, root: dict[str, Any]) -> list[str]:
    """What of `value` does not fit: the part of JSON Schema that pydantic writes."""
    if schema is True:
        return []
    if "$ref" in schema:
        return problems(value, root["$defs"][schema["$ref"].split("/")[-1]], root)
    if "anyOf" in schema:
        return min((problems(value, option, root) for option in schema["anyOf"]), key=len)
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        return [f"{value!r} is no {schema['type']}"]
    return [*own_problems(value, schema), *inner_problems(value, schema, root)]


def own_problems(value: Any, schema: dict[str, Any]) -> list[str]:
    wrong = {
        "const": value != schema.get("const", value),
        "enum": value not in schema.get("enum", [value]),
        "pattern": "pattern" in schema and not re.search(schema["pattern"], value),
    }
    return [
        f"{value!r}: {word} is {schema[word]!r}" for word, is_wrong in wrong.items() if is_wrong
    ]


def inner_problems(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if isinstance(value, dict):
        found += [f"no {name}" for name in schema.get("required", ()) if name not in value]
        named, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name, item in value.items():
            found += [f"{name}: {p}" for p in problems(item, named.get(name, other), root)]
    if isinstance(value, list):
        places = schema.get("prefixItems", [])
        for number, item in enumerate(value):
            one = places[number] if number < len(places) else schema.get("items", True)
            found += [f"{number}: {p}" for p in problems(item, one, root)]
    return found


def test_an_engines_options_are_those_of_the_ops_that_have_them(rlbench: Rlbench) -> None:
    text = " ".join(rlbench("engines", code=0).out.split())
    entries = re.split(r"(?=flashinfer(?::\S+)? not here|flashinfer(?::\S+)? here)", text)
    computed = {
        entry.split()[0]: entry.partition("computes ")[2].split()[:2]
        for entry in entries
        if entry.startswith("flashinfer")
    }
    assert computed["flashinfer"][0] == "norm"
    assert computed["flashinfer:backend=fa2"][0] == "attention"
    assert all("norm" not in ops[0] for name, ops in computed.items() if ":" in name)
