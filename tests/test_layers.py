"""The import direction, and that describing engines needs none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlbench
from rlbench import discover

PACKAGE = Path(rlbench.__file__).parent
ROOT = PACKAGE.parent

# From the bottom up; a module may import its own layer and those below.
LEVELS = {
    "measure": 0,
    "results": 0,
    "ops": 1,
    "engines": 2,
    "scenarios": 2,
    "discover": 3,
    "envs": 4,
    "plan": 4,
    "run": 5,
    "merge": 5,
    "differences": 5,
    "render": 5,
    "cli": 6,
    "__main__": 7,
}
FOR_ALL = {"rlbench", "rlbench.errors", "rlbench.results.vocabulary"}
SIBLINGS = [("measure", "results"), ("engines", "scenarios")]
HEAVY = ("typer", "rich", "pydantic", "numpy", "safetensors")
MAY_BE_HEAVY = ["cli", "render", "results.schema", "results.store", "merge"]
MAY_BE_HEAVY += ["differences", "run.recorder", "run.supervisor"]


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports(module: str, *, typing_too: bool = True) -> set[str]:
    """Every module that `module` imports anywhere, in functions as well, as dotted names."""
    file = MODULES[module]
    found: set[str] = set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if typing_too or not (
                isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            ):
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            found.update(alias.name for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in MODULES else base)

    Visitor().visit(ast.parse(file.read_text(encoding="utf-8")))
    return found


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "rlbench"


def within(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] == "rlbench"}


def test_every_module_has_its_place() -> None:
    layers = {layer(m) for m in MODULES}
    assert layers - {"rlbench", "errors", "kernels"} == set(LEVELS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    own = layer(module)
    for target in within(module) - FOR_ALL:
        other = layer(target)
        if own == "kernels":
            assert other == "kernels", f"{module} imports {target}: kernels stand alone"
        elif other == "kernels":
            assert module == "rlbench.engines.rlbench", f"{module} imports {target}"
        else:
            assert own in LEVELS, f"{module} imports {target}, and may be used by all"
            assert LEVELS[own] >= LEVELS[other], f"{module} imports {target}, which is above it"
            assert own == other or (own, other) not in SIBLINGS, f"{module} imports {target}"
            assert own == other or (other, own) not in SIBLINGS, f"{module} imports {target}"


def test_package_itself_imports_nothing() -> None:
    assert imports("rlbench") == set()
    assert imports("rlbench.results.vocabulary") == {"__future__", "enum"}


@pytest.mark.parametrize("module", [m for m in MODULES if layer(m) != "kernels"])
def test_heavy_packages_stay_where_no_worker_comes(module: str) -> None:
    allowed = any(
        module == f"rlbench.{place}" or module.startswith(f"rlbench.{place}.")
        for place in MAY_BE_HEAVY
    )
    heavy = {name for name in imports(module) if name.split(".")[0] in HEAVY}
    assert allowed or not heavy


@pytest.mark.parametrize(
    "start",
    ["rlbench.run.worker", "rlbench.run.inspect_environment", "rlbench.run.import_modules"],
)
def test_nothing_a_worker_reaches_imports_a_heavy_package(start: str) -> None:
    reached: set[str] = set()
    waiting = [start, *(m for m in MODULES if layer(m) in ("engines", "scenarios", "ops"))]
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        names = imports(module, typing_too=False)
        heavy = {name for name in names if name.split(".")[0] in HEAVY}
        assert not heavy or layer(module) == "kernels", f"{module} imports {heavy}"
        for name in names & MODULES.keys():
            parents = name.split(".")
            waiting += [".".join(parents[: i + 1]) for i in range(len(parents))]
    assert {"rlbench.scenarios._invariance", "rlbench.measure.bits"} <= reached


BLOCKED = [*HEAVY, "torch", "triton", "vllm", "flash_attn", "cutlass", "cuda", "flashinfer"]
BLOCKED += ["transformer_engine", "megatron", "sglang", "jax", "pydantic_core", "click"]
IMPORT_ALL = """
import importlib, sys
blocked, modules = sys.argv[1].split(","), sys.argv[2].split(",")
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Blocker())
for name in modules:
    importlib.import_module(name)
from rlbench import discover
print(len(discover.engines()), len(discover.ops()), len(discover.scenarios()))
for engine in {v.name: v.engine for v in discover.engines().values()}.values():
    engine.why_not_here("cuda", (9, 0))
assert not [b for b in blocked if b in sys.modules]
"""


def described() -> list[str]:
    """The modules read to say what there is: no helpers, and of packages only the top."""
    places = ("rlbench.engines.", "rlbench.ops.", "rlbench.scenarios.")
    return [
        m
        for m in MODULES
        if m.startswith(places) and m.count(".") == 2 and not m.split(".")[2].startswith("_")
    ]


def test_engines_ops_scenarios_and_the_worker_import_without_torch_or_any_engine() -> None:
    modules = [*described(), "rlbench.run.worker", "rlbench.run.inspect_environment"]
    modules += ["rlbench.plan", "rlbench.engines._engine", "rlbench.run.verdict"]
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(BLOCKED), ",".join(modules)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(described()) >= 8


def test_every_engine_file_is_discovered() -> None:
    files = {
        file.stem.replace("_", "-")
        for file in (PACKAGE / "engines").glob("*.py")
        if not file.name.startswith("_")
    }
    own = {v.name for v in discover.engines().values() if v.source.file is None}
    assert own == files
