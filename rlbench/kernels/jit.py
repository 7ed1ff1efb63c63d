"""Compiles CUDA C++ to cubins with NVRTC through cuda.core, and keeps them on disk.

A kernel is a source `rlbench/kernels/<name>.cu`; it may include only headers of
`rlbench/kernels/include`, in quotes. Compiling needs neither a GPU nor a driver; loading does.

The cache is `${XDG_CACHE_HOME:-~/.cache}/rlbench/kernels`, or the directory that
`RLBENCH_CACHE_DIR` names. An entry's name is the SHA-256 of everything that the cubin depends on,
so entries are never invalidated and the directory may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import tempfile
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cuda.core import Kernel

__all__ = ["Cubin", "KernelBuildError", "Usage", "cache_directory", "compile_cubin", "load"]

ROOT = Path(__file__).parent
INCLUDE = ROOT / "include"

# Contraction is off because whether a*b+c rounds once or twice is part of a kernel's definition:
# the sources say __fmaf_rn where they mean it.
_LANGUAGE = "c++17"
_CONTRACT = False
_PTXAS_OPTIONS = ("-v", "--warn-on-spills")
_MAGIC = b"rlbench cubin 1\n"
_INSTALL = 'pip install "cuda-core>=1.2,<2" "cuda-bindings>=13,<14" "nvidia-cuda-nvrtc>=13,<14"'


class KernelBuildError(RuntimeError):
    """A kernel could not be compiled, cached safely, or loaded."""


@dataclass(frozen=True)
class Usage:
    """What ptxas says that a kernel takes: registers a thread, and bytes a thread of the rest."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, with the log of the compilation that made it."""

    name: str
    arch: str
    code: bytes
    log: str
    from_cache: bool

    def usage(self) -> Usage:
        """Registers, stack and spills, from the log. Several kernels in one source: the largest.

        Raises:
            KernelBuildError: the log does not have ptxas's figures.
        """
        registers = re.findall(r"Used (\d+) registers", self.log)
        memory = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", self.log
        )
        if not registers or not memory:
            raise KernelBuildError(
                f"kernel {self.name!r} for {self.arch}: no resource usage in the log:\n{self.log}"
            )
        stack, stores, loads = (max(map(int, column)) for column in zip(*memory, strict=True))
        return Usage(max(map(int, registers)), stack, stores, loads)

    def warnings(self) -> list[str]:
        """The log's lines that warn: spills, serialized wgmma, ignored directives."""
        return [line for line in self.log.splitlines() if "warning" in line.lower()]


def cache_directory() -> Path:
    """The directory that holds the cubins, created with mode 0700 where it is missing.

    Raises:
        KernelBuildError: others could write there (what it holds is run on the GPU), or it belongs
            to someone else.
        OSError: it cannot be created.
    """
    chosen = os.environ.get("RLBENCH_CACHE_DIR")
    if chosen:
        directory = Path(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(base) / "rlbench" / "kernels"
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        status = directory.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise KernelBuildError(f"kernel cache {directory} is not a directory") from None
        writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid != os.geteuid() or writable:
            raise KernelBuildError(
                f"kernel cache {directory} belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):04o}; it must be yours and writable by you alone: "
                f"chmod 700 it, or set RLBENCH_CACHE_DIR to another directory"
            ) from None
    return directory


def compile_cubin(name: str, *, arch: str, defines: Mapping[str, str | int] | None = None) -> Cubin:
    """Compiles `rlbench/kernels/<name>.cu`, or takes the result from the cache.

    Args:
        name: the source's path below `rlbench/kernels`, without `.cu`:
            `"attention/attention_generic"`.
        arch: the machine to compile for: `"sm_80"`, `"sm_90a"`, `"sm_100a"`.
        defines: preprocessor macros and their values.

    Raises:
        KernelBuildError: no such source or header, no compiler, an error in the source, or an
            unsafe cache directory.
    """
    defines = dict(defines or {})
    what = f"kernel {name!r} for {arch}"
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise KernelBuildError(f"{what}: arch must look like sm_80, sm_90a or sm_100a")
    path = ROOT / f"{name}.cu"
    try:
        source = path.read_text()
    except OSError as error:
        known = sorted(str(p.relative_to(ROOT).with_suffix("")) for p in ROOT.rglob("*.cu"))
        raise KernelBuildError(f"{what}: no source {path}; there are {known}") from error

    key = _key(what, source, _headers(what, source), arch, defines)
    try:
        entry = cache_directory() / f"{key}.cubin"
        cached = _read_entry(entry)
    except OSError as error:
        warnings.warn(f"kernels are not cached: {error}", RuntimeWarning, stacklevel=2)
        return _compile(name, what, source, arch, defines)
    if cached is not None:
        log, code = cached
        return Cubin(name, arch, code, log, from_cache=True)
    cubin = _compile(name, what, source, arch, defines)
    try:
        _write_entry(entry, cubin)
    except OSError as error:
        warnings.warn(f"{what} is not cached: {error}", RuntimeWarning, stacklevel=2)
    return cubin


_loaded: dict[tuple[str, str, tuple[tuple[str, str | int], ...], str], Kernel] = {}
_loading = threading.Lock()


def load(
    name: str, *, arch: str, defines: Mapping[str, str | int] | None = None, kernel: str
) -> Kernel:
    """The kernel, ready for `cuda.core.launch`; compiled and loaded once in a process.

    Needs a GPU and a current CUDA context. The handle serves every device of architecture `arch`.

    Args:
        name, arch, defines: as in `compile_cubin`.
        kernel: the name of the `extern "C" __global__` function.

    Raises:
        KernelBuildError: as in `compile_cubin`; or the driver refuses the code, or has no such
            kernel in it.
    """
    key = (name, arch, tuple(sorted((defines or {}).items())), kernel)
    with _loading:
        found = _loaded.get(key)
        if found is None:
            cubin = compile_cubin(name, arch=arch, defines=defines)
            try:
                from cuda.core import ObjectCode

                found = ObjectCode.from_cubin(cubin.code, name=name).get_kernel(kernel)
            except Exception as error:
                raise KernelBuildError(
                    f"kernel {name!r} for {arch}: cannot load {kernel!r}: {error}\n{cubin.log}"
                ) from error
            _loaded[key] = found
        return found


def _headers(what: str, source: str) -> dict[str, bytes]:
    """Every header that the source includes, directly or not: name to content."""
    found: dict[str, bytes] = {}
    pending = [source]
    while pending:
        text = pending.pop()
        for bracket, header in re.findall(
            r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)', text, re.MULTILINE
        ):
            if bracket == "<":
                raise KernelBuildError(
                    f"{what}: #include <{header}>: only the headers of {INCLUDE}, in quotes"
                )
            if header in found:
                continue
            try:
                found[header] = (INCLUDE / header).read_bytes()
            except OSError as error:
                known = sorted(p.name for p in INCLUDE.iterdir()) if INCLUDE.is_dir() else []
                raise KernelBuildError(
                    f"{what}: no header {header!r} in {INCLUDE}; there are {known}"
                ) from error
            pending.append(found[header].decode())
    return found


def _key(
    what: str,
    source: str,
    headers: Mapping[str, bytes],
    arch: str,
    defines: Mapping[str, str | int],
) -> str:
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        raise KernelBuildError(f"{what}: NVRTC is missing ({error}): {_INSTALL}") from error
    if int(status) != 0:
        raise KernelBuildError(f"{what}: NVRTC does not tell its version: {status}")
    parts = {
        "arch": arch,
        "nvrtc": [int(major), int(minor)],
        "options": [_LANGUAGE, _CONTRACT, _PTXAS_OPTIONS],
        "defines": sorted((macro, str(value)) for macro, value in defines.items()),
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "headers": sorted((h, hashlib.sha256(text).hexdigest()) for h, text in headers.items()),
    }
    return hashlib.sha256(_MAGIC + json.dumps(parts).encode()).hexdigest()


def _compile(
    name: str, what: str, source: str, arch: str, defines: Mapping[str, str | int]
) -> Cubin:
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise KernelBuildError(f"{what}: cuda.core is missing ({error}): {_INSTALL}") from error
    log = io.StringIO()
    try:
        options = ProgramOptions(
            name=f"{name}.cu",
            arch=arch,
            std=_LANGUAGE,
            fma=_CONTRACT,
            include_path=str(INCLUDE),
            # An empty list is refused.
            define_macro=[(macro, str(value)) for macro, value in defines.items()] or None,
            ptxas_options=list(_PTXAS_OPTIONS),
        )
        code = Program(source, code_type="c++", options=options).compile("cubin", logs=log).code
    except Exception as error:  # cuda.core's own exceptions are not public
        settings = ", ".join(f"{macro}={value}" for macro, value in defines.items())
        raise KernelBuildError(f"{what} ({settings}):\n{error}\n{log.getvalue()}") from error
    return Cubin(name, arch, bytes(code), log.getvalue().replace("\0", ""), from_cache=False)


# An entry: the magic line, the SHA-256 of all that follows, the log's length, the log, the code.
def _read_entry(path: Path) -> tuple[str, bytes] | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    start = len(_MAGIC) + 32
    digest, payload = content[len(_MAGIC) : start], content[start:]
    if not content.startswith(_MAGIC) or hashlib.sha256(payload).digest() != digest:
        return None  # truncated or damaged: compiled anew and replaced
    length = int.from_bytes(payload[:8], "little")
    return payload[8 : 8 + length].decode(), payload[8 + length :]


def _write_entry(path: Path, cubin: Cubin) -> None:
    log = cubin.log.encode()
    payload = len(log).to_bytes(8, "little") + log + cubin.code
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
