"""`rlbench engines`: every engine, whether it runs here, what is claimed for it, how to get it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from rlbench import discover
from rlbench.engines._engine import Engine

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


def engines() -> None:
    """List every engine: available here or why not, its claims, how to get it."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from rlbench.envs.groups import of_engine

    console, device = Console(), device_type()
    for engine_id, variant in discover.engines().items():
        engine = variant.engine
        reason = engine.why_not_here(device, None)
        line = Text(f"{engine_id}  ", style="bold")
        line.append("not here" if reason else "here", style="dim" if reason else "green")
        computed = ", ".join(op for op in engine.load if variant.computes(op))
        line.append(f"  {engine.summary}; computes {computed}", style="dim")
        console.print(line)
        claims = engine.claims_of(dict(variant.options))
        details = [f"claims {claim.property.value}: {claim.source}" for claim in claims]
        if reason and engine.install not in reason:
            details.append(f"to get it: {engine.install}")
        group = of_engine(engine)
        if reason and group:
            details.append(f"or, in an environment of its own: rlbench env create {group.name}")
        for detail in (reason or version_of(engine), *details):
            console.print(Padding(Text(detail), (0, 0, 0, 4)))


def device_type() -> str:
    """`cuda` where an NVIDIA driver is present, judged without torch."""
    return "cuda" if any(Path(file).exists() for file in DRIVER_FILES) else "cpu"


def version_of(engine: Engine) -> str:
    """`distribution version` of an engine that is here."""
    try:
        return f"{engine.distribution} {importlib.metadata.version(engine.distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return engine.distribution
