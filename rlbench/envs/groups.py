"""Engine groups: packages that were tested together, read from groups.toml."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rlbench import discover
from rlbench.engines._engine import Engine
from rlbench.envs import toml
from rlbench.errors import unknown

FILE = Path(__file__).with_name("groups.toml")


@dataclass(frozen=True)
class Compiled:
    """What of a group has no wheel, and has to be compiled in its environment."""

    packages: tuple[str, ...]
    needs: tuple[str, ...]
    """Requirements that have to be there before, beside those of every group."""
    variables: Mapping[str, str]
    """Environment variables of the compilation; those the user has set stay."""
    note: str
    """What it takes, for the user."""


@dataclass(frozen=True)
class Group:
    """Packages that one environment can hold together."""

    name: str
    summary: str
    python: str
    """The version of Python they were tested with, such as `3.12`."""
    everywhere: tuple[str, ...]
    """Requirements of every group: torch and what belongs to it."""
    requires: tuple[str, ...]
    """Requirements of this group alone."""
    compiled: Compiled | None = field(default=None)

    @property
    def pins(self) -> tuple[str, ...]:
        """All requirements."""
        return (*self.everywhere, *self.requires)

    @property
    def distributions(self) -> set[str]:
        """The names of the packages that make this group what it is."""
        own = (*self.requires, *(self.compiled.packages if self.compiled else ()))
        return {distribution(requirement) for requirement in own}


@cache
def groups() -> Mapping[str, Group]:
    """Group name -> group."""
    data = toml.tables(str(FILE), FILE)
    return {
        name: Group(
            name,
            table["summary"],
            data["python"],
            tuple(data["everywhere"]),
            tuple(table["requires"]),
            _compiled(table["compiled"]) if "compiled" in table else None,
        )
        for name, table in data["groups"].items()
    }


def _compiled(table: Mapping[str, object]) -> Compiled:
    words = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    return Compiled(**words)  # type: ignore[arg-type]


def named(names: Iterable[str]) -> list[Group]:
    """The groups of these names, each once. Raises UsageError for one that does not exist."""
    found = groups()
    for name in names:
        if name not in found:
            raise unknown("env create", name, found)
    return [found[name] for name in dict.fromkeys(names)]


def of_engine(engine: Engine) -> Group | None:
    """The group that brings an engine, if one does."""
    wanted = canonical(engine.distribution)
    return next((g for g in groups().values() if wanted in g.distributions), None)


def engines_of(group: Group) -> list[str]:
    """The group's engines as a file of environments names them: `fa2*` is fa2 with all options."""
    ids: dict[str, list[str]] = {}
    for engine_id, variant in discover.engines().items():
        if of_engine(variant.engine) == group:
            ids.setdefault(variant.name, []).append(engine_id)
    return [word for name, all_ids in ids.items() for word in _words(name, all_ids)]


def _words(name: str, ids: list[str]) -> list[str]:
    """The shortest way to name these ids and no others."""
    short = ([name], [f"{name}*"])
    return next((w for w in short if discover.select("engines", w) == ids), ids)


def distribution(requirement: str) -> str:
    """The package that a requirement is about: `a-b` for `A_b[extra]==1`."""
    return canonical(re.split(r"[\s\[<>=!~;@]", requirement.strip(), maxsplit=1)[0])


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
