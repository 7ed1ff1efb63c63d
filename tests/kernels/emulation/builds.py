"""A build of a kernel as a program for the CPU, and launching it.

The source and its headers are the real ones, but for the headers that hold inline PTX: `include/`
has what stands in for those. A thread block or cluster runs in one thread, as fibers; copies and
products happen as early or as late as they may. Each launch is a process: what it must not do (a
read outside of its tensors, a deadlock) ends that process alone, and is an AssertionError here.
"""

from __future__ import annotations

import atexit
import functools
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

from rlbench.kernels import jit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlbench.kernels.attention.launch import Build
    from rlbench.kernels.attention.tensor_map import TensorMap

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")
RUNTIME = ("emulator", "main")
# A contracted a * b + c would round once where the kernels round twice.
FLAGS = ("-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-w")
ABSENT = 2**64 - 1  # in main.cpp


class Edit(NamedTuple):
    """A change of a source or a header, to see what it leads to."""

    file: str
    old: str
    new: str

    def __call__(self, name: str, text: str) -> str:
        if name != self.file:
            return text
        assert text.count(self.old) == 1, f"{name} has not one {self.old!r}"
        return text.replace(self.old, self.new)


class Schedule(NamedTuple):
    """What a GPU may do in one way or another."""

    lazy: bool = False
    """Copies and products happen when they are waited for, not when they are started."""
    seed: int = 0
    """Of the order in which threads run; 0: ascending."""


EAGER = Schedule()
SHUFFLED = Schedule(seed=3)
LAZY = Schedule(lazy=True)
LAZY_SHUFFLED = Schedule(lazy=True, seed=7)


class Shape(NamedTuple):
    """Of a launch."""

    blocks: int
    threads: int
    ranks: int
    """Blocks of a cluster."""
    shared_bytes: int


def skip_where_it_cannot_run() -> None:
    """Skip the module that calls this where there is no compiler, or no x86-64 to switch fibers."""
    if COMPILER is None:
        pytest.skip("needs g++ or c++", allow_module_level=True)
    if platform.machine() not in {"x86_64", "AMD64"}:
        pytest.skip("fibers are switched in x86-64's assembly", allow_module_level=True)


@functools.cache
def program(build: Build, edit: Edit | None = None) -> Path:
    """The build, compiled on first use."""
    text = (jit.ROOT / f"{build.source}.cu").read_text()
    return compiled(text, dict(build.defines), build.kernel, edit, Path(build.source).name)


def compiled(
    source: str,
    defines: dict[str, str | int],
    name: str,
    edit: Edit | None = None,
    source_name: str = "",
) -> Path:
    """A program that launches the source's kernel, which `defines` call KERNEL_NAME."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_folder()))
    headers = [*jit.INCLUDE.glob("*.cuh"), *HERE.glob("*.h"), *HERE.glob("include/*.cuh")]
    for header in headers:  # later ones take the place of earlier ones
        text = header.read_text()
        (folder / header.name).write_text(edit(header.name, text) if edit else text)
    if edit:
        source = edit(f"{source_name}.cu", source)
    # The one declaration that no macro can turn into C++.
    source = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?unsigned char (\w+)\[\];",
        r"unsigned char* \1 = emulator::running->shared;",
        source,
    )
    file = folder / "kernel.cpp"
    file.write_text(f'#include "cuda.h"\n{source}\n#include "call.h"\n')
    macros = [f"-D{macro}={value}" for macro, value in defines.items()]
    _compile(*macros, f"-I{folder}", str(file), *_runtime(), "-o", str(folder / "program"))
    return folder / "program"


def launch(
    program: Path,
    shape: Shape,
    tensors: Sequence[torch.Tensor | None],
    written: Sequence[torch.Tensor | None],
    numbers: Sequence[int | float],
    schedule: Schedule,
    maps: Sequence[TensorMap] = (),
) -> None:
    """Run a kernel whose parameters are the tensors, then the numbers, then maps of tensors.

    Those that are also in `written` have afterwards what it has left there.
    """
    header = (*shape, int(schedule.lazy), schedule.seed, len(tensors))
    message = [struct.pack(f"<{len(header)}Q", *header)]
    results = []
    for tensor in tensors:
        is_written = any(tensor is each for each in written)
        if tensor is None:
            message.append(struct.pack("<QQ", 0, ABSENT))
            continue
        raw = raw_bytes(tensor)
        message += [struct.pack("<QQ", int(is_written), raw.numel()), raw.numpy().tobytes()]
        if is_written:
            results.append(raw)
    message.append(struct.pack("<Q", len(numbers)))
    message += [struct.pack("<d" if isinstance(n, float) else "<q", n) for n in numbers]
    message.append(struct.pack("<Q", len(maps)))
    for each in maps:
        words = (*each.shape, *each.strides, *each.box)
        message.append(struct.pack(f"<Qq{len(words)}Q", each.pointer, each.shift, *words))
    done = subprocess.run(
        [program], input=b"".join(message), capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode() or f"it ended with {done.returncode}"
    output = torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8)
    for raw, left in zip(
        results, torch.split(output, [raw.numel() for raw in results]), strict=True
    ):
        raw.copy_(left)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All that the tensor's storage holds, also where the tensor has gaps."""
    assert tensor.storage_offset() == 0
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@functools.cache
def _folder() -> str:
    folder = tempfile.mkdtemp(prefix="emulated-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _runtime() -> tuple[str, ...]:
    """What all programs share, as object files."""
    objects = []
    for name in RUNTIME:
        objects.append(f"{_folder()}/{name}.o")
        _compile("-c", str(HERE / f"{name}.cpp"), "-o", objects[-1])
    return tuple(objects)


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    done = subprocess.run(
        [COMPILER, *FLAGS, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:4000]
