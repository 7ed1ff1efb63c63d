"""What there is: ops, scenarios and engines, found by file name. Imports nothing heavy.

An op is a module or package in `rlbench/ops` with an `OP`, a scenario a module in
`rlbench/scenarios` with a `SCENARIO`, an engine a module in `rlbench/engines` with an `ENGINE`;
names that begin with an underscore are helpers. Other distributions add engines through the
entry-point group `rlbench.engines`, each entry naming one self-contained module.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import rlbench.engines
import rlbench.ops
import rlbench.scenarios
from rlbench.engines._engine import Engine
from rlbench.errors import UsageError, unknown
from rlbench.ops._op import Op
from rlbench.scenarios._scenario import Scenario

ENTRY_POINTS = "rlbench.engines"


@dataclass(frozen=True)
class Source:
    """Where an engine's module is: a module of this package, or a file of another one."""

    name: str
    module: str
    file: str | None = None

    def load(self) -> Engine:
        """Import the module and return its ENGINE."""
        try:
            if self.file is None:
                module = importlib.import_module(self.module)
            else:
                module = _module_from_file(self.module, self.file)
        except Exception as why:
            raise UsageError(
                f"engine {self.name!r}: {self.module} cannot be imported: "
                f"{type(why).__name__}: {why}; mend or uninstall it"
            ) from why
        engine = getattr(module, "ENGINE", None)
        if not isinstance(engine, Engine):
            raise UsageError(f"engine {self.name!r}: {self.module} defines no ENGINE")
        return engine


@dataclass(frozen=True)
class Variant:
    """One engine with its options chosen: what the report calls an engine."""

    name: str
    options: tuple[tuple[str, str], ...]
    engine: Engine
    source: Source

    @property
    def id(self) -> str:
        """`name`, `name:option=value` or `name:flag`."""
        chosen = ",".join(f"{k}={v}" if v else k for k, v in self.options)
        return f"{self.name}:{chosen}" if chosen else self.name

    def computes(self, op: str) -> bool:
        """Whether it is one of the engine's ways to compute `op`."""
        return self.options in self.engine.variants_for(op)


@cache
def ops() -> Mapping[str, Op]:
    """Op name -> op."""
    return {name: module.OP for name, module in _modules(rlbench.ops)}


@cache
def scenarios() -> Mapping[str, Scenario]:
    """Scenario name -> scenario."""
    return {name: module.SCENARIO for name, module in _modules(rlbench.scenarios)}


@cache
def engines() -> Mapping[str, Variant]:
    """Engine id -> variant, every option set of every engine."""
    found: dict[str, Variant] = {}
    for source in _sources():
        engine = source.load()
        for options in engine.all_variants():
            variant = Variant(source.name, options, engine, source)
            if variant.id in found:
                raise UsageError(
                    f"engine {variant.id!r} exists twice: in {found[variant.id].source.module} "
                    f"and in {source.module}; uninstall or rename one"
                )
            found[variant.id] = variant
    return found


def select(option: str, wanted: Iterable[str]) -> list[str]:
    """Engine ids for what the user named: an id, a name for all its options, or a pattern.

    `fa3` is the plain engine, because that is its id; `torch-sdpa`, which is no id, means all of
    its backends; `fa3*` means whatever it matches.
    """
    known = engines()
    chosen: list[str] = []
    for word in wanted:
        matches = [word] if word in known else _matching(word, known)
        if not matches:
            raise unknown(option, word, {*known, *(v.name for v in known.values())})
        chosen += matches
    return list(dict.fromkeys(chosen))


def _matching(word: str, known: Mapping[str, Variant]) -> list[str]:
    return [i for i, v in known.items() if v.name == word or fnmatch.fnmatchcase(i, word)]


def _modules(package: ModuleType) -> list[tuple[str, ModuleType]]:
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    prefix = package.__name__
    return [(n.replace("_", "-"), importlib.import_module(f"{prefix}.{n}")) for n in names]


def _sources() -> list[Source]:
    own = [
        Source(m.name.replace("_", "-"), f"rlbench.engines.{m.name}")
        for m in pkgutil.iter_modules(rlbench.engines.__path__)
        if not m.name.startswith("_")
    ]
    return own + [_plugin(point) for point in importlib.metadata.entry_points(group=ENTRY_POINTS)]


def _plugin(point: importlib.metadata.EntryPoint) -> Source:
    try:
        spec = importlib.util.find_spec(point.module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UsageError(
            f"engine {point.name!r}: the module {point.module!r} that a plug-in registers in "
            f"{ENTRY_POINTS!r} cannot be found; reinstall or remove that plug-in"
        )
    return Source(point.name, point.module, spec.origin)


def _module_from_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"rlbench_plugin.{name}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"engine plug-in {name!r}: {file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
