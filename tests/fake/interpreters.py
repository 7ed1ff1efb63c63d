"""Interpreters with chosen packages only, made of links to those of the running one."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(folder: Path, distributions: Iterable[str], *, rlbench: bool = False) -> str:
    """The interpreter of a new environment with these distributions and what they need.

    rlbench: this source tree as well. Raises LookupError if a distribution is not installed here.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for name in closure(distributions):
        link(importlib.metadata.distribution(name), Path(site))
    if rlbench:
        (Path(site) / "rlbench_tree.pth").write_text(f"{ROOT}\n")
    return str(python)


def bare(folder: Path, python: str = sys.executable) -> tuple[str, Path]:
    """The interpreter of a new environment without any package, and its site-packages."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    return str(folder / "bin" / "python"), site


def package(site: Path, distribution: str, version: str, **modules: str) -> None:
    """Install a distribution of these modules, given by their text."""
    metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
"""
"""A module that says of itself what an inspection asks of torch."""


def closure(names: Iterable[str]) -> set[str]:
    """The distributions and everything they need; extras left out."""
    found: set[str] = set()
    queue = [canonical(name) for name in names]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # needed on other systems only, or the caller finds out
        found.add(name)
        queue += [canonical(n) for n in needs if "extra ==" not in n]
    missing = {canonical(name) for name in names} - found
    if missing:
        raise LookupError(f"not installed here: {', '.join(sorted(missing))}")
    return found


def canonical(requirement: str) -> str:
    return re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Link a distribution's top-level files and folders into `site`."""
    for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        target = site / name
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(name))))


@cache
def python(version: str) -> str | None:
    """An interpreter of that version, such as `3.12`, if there is one that starts."""
    candidates = [shutil.which(f"python{version}")]
    candidates += map(str, Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python3"))
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        candidates.append(sys.executable)
    for candidate in candidates:
        if candidate and starts(candidate):
            return candidate
    return None


def starts(python: str) -> bool:
    try:
        subprocess.run([python, "-c", ""], capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
