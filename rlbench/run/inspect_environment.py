"""Asks an interpreter what it has: runs inside it, prints one JSON object on its last line."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from typing import Any

from rlbench import discover

ALWAYS = ("torch", "triton", "numpy")
PREFIXES = ("nvidia-", "cuda-")


def main(arguments: list[str]) -> None:
    """`arguments`: the device asked for, and the engines' sources as JSON."""
    device, sources = arguments[0], json.loads(arguments[1])
    engines = {name: discover.Source(name, *where).load() for name, where in sources.items()}
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": packages({engine.distribution for engine in engines.values()}),
        "missing": {name: engine.missing_module() for name, engine in engines.items()},
    }
    try:
        import torch
    except Exception as why:  # a library that torch itself cannot load is no ImportError
        facts["no_torch"] = str(why) or type(why).__name__
        _answer(facts)
        return
    cuda = torch.cuda.is_available()
    resolved = ("cuda:0" if cuda else "cpu") if device == "auto" else device
    facts["device_count"] = torch.cuda.device_count() if cuda else 0
    facts["device_name"] = resolved
    if resolved.startswith("cuda") and int(resolved[5:]) >= facts["device_count"]:
        facts["no_device"] = f"torch sees {facts['device_count']} CUDA devices"
    else:
        from rlbench.measure.device import describe

        facts["device"] = describe(resolved)
        capability = facts["device"]["compute_capability"]
        facts["why_not"] = {
            name: engine.why_not_here(resolved.split(":")[0], capability and tuple(capability))
            for name, engine in engines.items()
        }
    _answer(facts)


def _answer(facts: dict[str, Any]) -> None:
    """After a line break: an engine may have left one open."""
    sys.stdout.write(f"\n{json.dumps(facts)}\n")


def packages(distributions: set[str]) -> dict[str, str]:
    """Versions of the installed packages that can change a result."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in ALWAYS or name in distributions or name.startswith(PREFIXES):
            # The first one found is the one that is imported.
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))
