"""The pins of the engine groups: the extras say the same, and no engine has two homes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rlbench import discover
from rlbench.envs import toml
from rlbench.envs.create import commands
from rlbench.envs.groups import canonical, distribution, engines_of, groups, named, of_engine
from rlbench.envs.listing import table
from rlbench.errors import UsageError
from rlbench.run.interpreters import from_file

ROOT = Path(__file__).parents[2]
PROJECT = toml.tables("pyproject", ROOT / "pyproject.toml")
EXTRAS = PROJECT["project"]["optional-dependencies"]
ENGINES = {v.name: v.engine for v in discover.engines().values()}


@pytest.mark.parametrize("name", groups())
def test_extra_has_the_same_pins(name: str) -> None:
    assert tuple(EXTRAS[name]) == groups()[name].pins


def test_groups_are_declared_as_conflicting() -> None:
    (conflicting,) = PROJECT["tool"]["uv"]["conflicts"]
    assert [entry["extra"] for entry in conflicting] == list(groups())


@pytest.mark.parametrize("name", groups())
def test_every_requirement_is_one_exact_version(name: str) -> None:
    for pin in groups()[name].pins:
        assert re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\w.]+", pin)


@pytest.mark.parametrize("engine", [name for name, e in ENGINES.items() if of_engine(e)])
def test_command_that_brings_an_engine_names_the_tested_version(engine: str) -> None:
    group = of_engine(ENGINES[engine])
    assert group
    pins = {distribution(pin): pin.partition("==")[2] for pin in group.pins}
    given = re.findall(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)", ENGINES[engine].install)
    assert {name: pins.get(canonical(name), version) for name, version in given} == dict(given)


def test_engine_belongs_to_one_group_at_most() -> None:
    for engine in ENGINES.values():
        wanted = canonical(engine.distribution)
        assert sum(wanted in group.distributions for group in groups().values()) <= 1


def test_engine_is_found_in_the_group_of_its_package() -> None:
    flash, vllm = named(["flash", "vllm"])
    assert "fa4*" in engines_of(flash)
    assert {"fa2*", "fa3*"} <= set(engines_of(vllm))
    assert not [g for g in groups().values() if "torch-eager" in engines_of(g)]


@pytest.mark.parametrize("name", groups())
def test_engines_are_named_so_that_the_file_means_them_and_no_others(
    name: str, tmp_path: Path
) -> None:
    group = groups()[name]
    path = tmp_path / "envs.toml"
    path.write_text(table(name, sys.executable, engines_of(group)))
    (found,) = from_file(path)
    meant = [i for i, v in discover.engines().items() if of_engine(v.engine) == group]
    assert sorted(found.engines) == sorted(meant)


def test_unknown_group_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"'vlm' is not known\. Did you mean 'vllm'\?.*flash"):
        named(["vlm"])
    assert [group.name for group in named(["vllm", "flash", "vllm"])] == ["vllm", "flash"]


def test_what_is_compiled_comes_last_and_against_the_torch_of_the_group() -> None:
    train = groups()["train"]
    venv, first, second = commands("uv", train, Path("/e"), "3.12")
    assert " ".join(venv) == "uv venv --quiet --no-project --relocatable --python 3.12 /e"
    assert first[:5] == ["uv", "pip", "install", "--python", "/e/bin/python"]
    assert set(train.everywhere) <= set(first)
    assert "setuptools" in first
    assert not set(train.requires) & set(first)
    at = second.index("--no-build-isolation-package")
    assert second[at + 1] == "transformer-engine-torch"
    assert second[-len(train.pins) :] == list(train.pins)


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("a==1", "a"), ("A_b.c[x,y]==1", "a-b-c"), ("a >=2", "a"), ("a;x<1", "a"), ("a", "a")],
)
def test_distribution_of_a_requirement(requirement: str, name: str) -> None:
    assert distribution(requirement) == name
