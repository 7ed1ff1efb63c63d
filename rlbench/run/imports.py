"""Which engines import where: each tried in a fresh process of its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlbench import discover
from rlbench.engines._engine import Engine
from rlbench.run.interpreters import Interpreter
from rlbench.run.process import how, run_module, tail, without_folders

AT_ONCE = 4
"""An import can take gigabytes of memory and all of a core."""
LONGEST_REASON = 400


class State(str, Enum):
    """What became of an import."""

    IMPORTS = "imports"
    ABSENT = "absent"
    INCOMPLETE = "incomplete"
    FAILS = "fails"


@dataclass(frozen=True)
class Finding:
    """One engine in one environment."""

    state: State
    version: str | None
    """Of the engine's distribution, if it is installed there."""
    reason: str | None = None
    """Why it does not import."""


def find(
    interpreters: Sequence[Interpreter], facts: Mapping[str, Mapping[str, Any]], timeout_s: float
) -> dict[tuple[str, str], Finding]:
    """(environment, engine) -> what was found. facts: the answers of `environments.ask`.

    What is not there on disk is not tried; engines that need the same modules are tried once.
    """
    engines = {v.name: v.engine for v in discover.engines().values()}
    wanted = {
        (i.name, name): (i.python, engine.modules)
        for i in interpreters
        for name, engine in engines.items()
        if facts[i.name]["missing"][name] is None
    }
    tries = list(dict.fromkeys(wanted.values()))
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        failures = list(pool.map(lambda t: try_import(*t, timeout_s=timeout_s), tries))
    outcome = dict(zip(tries, failures, strict=True))
    found = {}
    for interpreter in interpreters:
        for name, engine in engines.items():
            key = (interpreter.name, name)
            failure = outcome[wanted[key]] if key in wanted else None
            found[key] = _finding(name, engine, facts[interpreter.name], failure)
    return found


def _finding(name: str, engine: Engine, facts: Mapping[str, Any], failure: str | None) -> Finding:
    version, missing = facts["packages"].get(engine.distribution), facts["missing"][name]
    if failure is not None:
        return Finding(State.FAILS, version, failure)
    if missing is None:
        return Finding(State.IMPORTS, version)
    if version is None:
        return Finding(State.ABSENT, version, f"module {missing} is not installed")
    reason = f"{engine.distribution} {version} is installed, but module {missing} is not there"
    return Finding(State.INCOMPLETE, version, reason)


def try_import(python: str, modules: Sequence[str], *, timeout_s: float) -> str | None:
    """Why the modules cannot be imported one after another in a fresh process, or None."""
    try:
        printed = run_module(python, "rlbench.run.import_modules", *modules, timeout_s=timeout_s)
        reason: str | None = json.loads(printed.splitlines()[-1])
    except subprocess.TimeoutExpired:
        reason = f"the import did not end within {timeout_s:g} s"
    except subprocess.CalledProcessError as failed:
        reason = f"the import {how(failed.returncode)}: {tail(failed.stderr) or 'it said nothing'}"
    except (OSError, ValueError, IndexError) as failed:
        reason = f"the import gave no answer: {failed}"
    return None if reason is None else without_folders(" ".join(reason.split()))[:LONGEST_REASON]
