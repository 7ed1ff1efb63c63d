"""Finding out what each interpreter has, without importing torch in the parent."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlbench import discover
from rlbench.errors import UsageError
from rlbench.plan import LOCAL, Environment
from rlbench.run.interpreters import Interpreter
from rlbench.run.process import run_module, tail

INSPECTION_TIMEOUT_S = 180.0


def inspect(interpreters: Sequence[Interpreter], device: str) -> list[Environment]:
    """The environments that can measure: rlbench's own interpreter first, if it has torch.

    Each is asked about all engines, not only the selected ones, so that what a report says of an
    environment (and its id) does not depend on the selection. device: `auto`, `cpu` or `cuda:N`.
    Raises UsageError for an interpreter that cannot be asked, and where no interpreter
    has torch or the device.
    """
    by_name = ask(interpreters, device)
    usable = {name: facts for name, facts in by_name.items() if "no_torch" not in facts}
    _refuse_without_torch(by_name, usable)
    chosen = _device(usable, device)
    engines = dict.fromkeys(v.name for v in discover.engines().values())
    return [
        _environment(interpreter, usable[interpreter.name], chosen, engines)
        for interpreter in interpreters
        if interpreter.name in usable
    ]


def ask(interpreters: Sequence[Interpreter], device: str) -> dict[str, dict[str, Any]]:
    """What each interpreter says of itself, by its name: see `inspect_environment`.

    Raises UsageError for one that cannot be asked.
    """
    sources = {v.name: v.source for v in discover.engines().values()}
    question = json.dumps({name: [s.module, s.file] for name, s in sources.items()})
    with ThreadPoolExecutor(len(interpreters)) as pool:
        answers = list(pool.map(lambda i: _ask(i.name, i.python, device, question), interpreters))
    return {i.name: facts for i, facts in zip(interpreters, answers, strict=True)}


def _ask(name: str, python: str, device: str, question: str) -> dict[str, Any]:
    arguments = ("rlbench.run.inspect_environment", device, question)
    try:
        printed = run_module(python, *arguments, timeout_s=INSPECTION_TIMEOUT_S)
        facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
    except subprocess.CalledProcessError as failed:
        said = tail(failed.stderr) or f"it ended with exit code {failed.returncode}"
        raise UsageError(f"--env {name}: {python} could not be asked: {said}") from failed
    except (ValueError, IndexError) as failed:
        raise UsageError(f"--env {name}: {python} is not a Python interpreter") from failed
    except (OSError, subprocess.SubprocessError) as failed:
        raise UsageError(f"--env {name}: {python} could not be asked: {failed}") from failed
    return facts


def _refuse_without_torch(answers: Mapping[str, Any], usable: Mapping[str, Any]) -> None:
    for name in answers:
        if name != LOCAL and name not in usable:
            raise UsageError(f"--env {name}: torch cannot be imported: {answers[name]['no_torch']}")
    if not usable:
        raise UsageError(
            f"torch cannot be imported here ({answers[LOCAL]['no_torch']}): "
            "pip install 'torch>=2.9', or name an interpreter that has it with --env NAME=PYTHON"
        )


def _device(usable: Mapping[str, Any], asked: str) -> str:
    """The one device all engines are measured on."""
    if asked == "auto":
        names = [facts["device_name"] for facts in usable.values()]
        return next((n for n in names if n.startswith("cuda")), "cpu")
    if all("no_device" in facts for facts in usable.values()):
        reasons = {name: facts["no_device"] for name, facts in usable.items()}
        text = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise UsageError(f"--device: {asked!r} is not there ({text}); choose cpu or another number")
    return asked


def _environment(
    interpreter: Interpreter, facts: dict[str, Any], device: str, engines: Iterable[str]
) -> Environment:
    why_not = facts.get("why_not", {})
    if facts["device_name"] != device or "no_device" in facts:
        why_not = dict.fromkeys(engines, f"torch in this environment has no {device}")
    said = {k: facts.get(k) for k in ("python", "packages", "device")}
    return Environment(
        _id(interpreter.name, said), interpreter.python, said, why_not, device, interpreter.engines
    )


def _id(name: str, facts: Mapping[str, Any]) -> str:
    """A named environment keeps its name; rlbench's own is told apart by what it holds.

    Two virtual environments on one machine are both `local`, and their reports shall merge.
    """
    if name != LOCAL:
        return name
    return f"{LOCAL}-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:6]}"
