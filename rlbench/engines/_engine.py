"""The contract of an engine: everything rlbench knows about one before loading it."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel

PROCESS_NUMBER = "RLBENCH_PROCESS"
"""Environment variable: 0 in a worker, 1 in the fresh process it checks itself against."""

Loader = Callable[[Mapping[str, str], str], "Kernel"]
"""(chosen options, device) -> the engine's entry points; the one place for heavy imports."""


@dataclass(frozen=True)
class Claim:
    """A property the engine's makers promise, and where they do."""

    property: Property
    source: str
    when: Mapping[str, str] = field(default_factory=dict)
    """Options the promise depends on, e.g. `{"splits": "1"}`."""


@dataclass(frozen=True)
class Engine:
    """One way to compute one or more ops. The module's file name is the engine's name.

    `variants` lists the option sets rlbench runs: `()` is the plain engine, `(("splits", "1"),)`
    is `name:splits=1`, an empty value is a flag, `name:deterministic`.
    """

    summary: str
    distribution: str
    """The installed package whose version identifies the engine."""
    modules: tuple[str, ...]
    """Dotted modules that must be present; looked up on disk, never imported, to decide."""
    install: str
    """The command that brings it."""
    load: Mapping[str, Loader]
    """Op name -> loader."""
    variants: tuple[tuple[tuple[str, str], ...], ...] = ((),)
    variants_of: Mapping[str, tuple[tuple[tuple[str, str], ...], ...]] = field(default_factory=dict)
    """Op name -> its variants, where an op has other options than `variants`."""
    claims: tuple[Claim, ...] = ()
    devices: tuple[str, ...] = ("cuda",)
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] = (99, 9)
    is_control: bool = False

    def variants_for(self, op: str) -> tuple[tuple[tuple[str, str], ...], ...]:
        """The option sets in which the engine computes `op`; none if it does not."""
        return self.variants_of.get(op, self.variants) if op in self.load else ()

    def all_variants(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Every option set, of whatever op."""
        every = [self.variants_for(op) for op in self.load] or [self.variants]
        return tuple(dict.fromkeys(variant for variants in every for variant in variants))

    def claims_of(self, options: Mapping[str, str]) -> list[Claim]:
        """The claims that hold for this choice of options."""
        return [c for c in self.claims if all(options.get(k) == v for k, v in c.when.items())]

    def why_not_here(self, device_type: str, capability: tuple[int, int] | None) -> str | None:
        """Why this interpreter or device cannot run the engine, or None; imports nothing."""
        if device_type not in self.devices:
            return f"needs a {' or '.join(self.devices)} device, not {device_type}"
        missing = self.missing_module()
        if missing:
            return f"module {missing} is not installed; to get it: {self.install}"
        if capability and not self.min_capability <= capability <= self.max_capability:
            low, high = self.min_capability, self.max_capability
            upper = "" if high[0] == 99 else f" to {high[0]}.{high[1]}"
            return (
                f"needs compute capability {low[0]}.{low[1]}{upper}, "
                f"this device has {capability[0]}.{capability[1]}"
            )
        return None

    def missing_module(self) -> str | None:
        """The first of `modules` that this interpreter does not have; imports nothing."""
        return next((m for m in self.modules if not module_exists(m)), None)


def options_for(**choices: tuple[str, ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """All combinations of option values, as `Engine.variants`."""
    return tuple(tuple(zip(choices, values, strict=True)) for values in product(*choices.values()))


def module_exists(dotted: str) -> bool:
    """Whether a module could be imported, judged from the file system alone.

    `importlib.util.find_spec("a.b")` would import `a`, which for some engines takes seconds and
    initializes CUDA.
    """
    search: list[str] | None = None
    for name in dotted.split("."):
        spec = _find(name, search)
        if spec is None:
            return False
        search = list(spec.submodule_search_locations or ())
    return True


def _find(name: str, search: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    if search is None and name in sys.builtin_module_names:
        return importlib.machinery.BuiltinImporter.find_spec(name)
    return importlib.machinery.PathFinder.find_spec(name, search)
