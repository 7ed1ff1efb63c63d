"""The cubin cache: what makes a new entry, what is refused, and what an error says."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from rlbench.kernels import jit

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC: pip install 'rlbench[kernels]'")

SOURCE = """
#include "outer.cuh"
extern "C" __global__ void scale(float* x, long long n) {
  if (threadIdx.x < n) x[threadIdx.x] *= factor() * FACTOR;
}
"""
OUTER = '#pragma once\n#include "inner.cuh"\n__device__ float factor() { return inner(); }\n'
INNER = "#pragma once\n__device__ float inner() { return 2.0f; }\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with two headers, one including the other, and an empty cache beside them."""
    root = tmp_path / "kernels"
    include = root / "include"
    include.mkdir(parents=True)
    (root / "scale.cu").write_text(SOURCE)
    (include / "outer.cuh").write_text(OUTER)
    (include / "inner.cuh").write_text(INNER)
    monkeypatch.setattr(jit, "ROOT", root)
    monkeypatch.setattr(jit, "INCLUDE", include)
    monkeypatch.setenv("RLBENCH_CACHE_DIR", str(tmp_path / "cache"))
    return root


def build(arch: str = "sm_80", factor: int = 3) -> jit.Cubin:
    return jit.compile_cubin("scale", arch=arch, defines={"FACTOR": factor})


def entries(tree: Path) -> list[Path]:
    return sorted((tree.parent / "cache").iterdir())


def test_second_build_comes_from_the_cache(tree: Path) -> None:
    first = build()
    second = build()
    assert not first.from_cache
    assert second.from_cache
    assert (second.code, second.log) == (first.code, first.log)
    assert first.code.startswith(b"\x7fELF")
    assert len(entries(tree)) == 1  # and no temporary file


def test_no_macros_need_to_be_defined(tree: Path) -> None:
    (tree / "scale.cu").write_text(SOURCE.replace("FACTOR", "2"))
    assert jit.compile_cubin("scale", arch="sm_80").code.startswith(b"\x7fELF")


def test_log_tells_registers_and_spills(tree: Path) -> None:
    usage = build().usage()
    assert usage.registers > 0
    assert (usage.stack_bytes, usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0, 0)
    assert build().usage() == usage
    assert build().warnings() == []


def test_whatever_changes_the_code_changes_the_key(tree: Path) -> None:
    build()
    assert not build(arch="sm_90a").from_cache
    assert not build(factor=4).from_cache
    (tree / "include" / "inner.cuh").write_text(INNER.replace("2.0f", "5.0f"))
    assert not build().from_cache, "a header that a header includes"
    (tree / "scale.cu").write_text(SOURCE + "\n// a comment")
    assert not build().from_cache, "the source"
    assert len(entries(tree)) == 5
    (tree / "include" / "unrelated.cuh").write_text("#error never included")
    assert build().from_cache


@pytest.mark.parametrize("damage", ["truncated", "emptied", "flipped", "foreign"])
def test_damaged_entry_is_rebuilt(tree: Path, damage: str) -> None:
    good = build()
    (entry,) = entries(tree)
    content = entry.read_bytes()
    entry.write_bytes(
        {
            "truncated": content[:-1],
            "emptied": b"",
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "foreign": b"something else entirely",
        }[damage]
    )
    again = build()
    assert not again.from_cache
    assert again.code == good.code
    assert build().from_cache
    assert entries(tree) == [entry]


def test_directory_is_private(tree: Path) -> None:
    build()
    cache = tree.parent / "cache"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    (entry,) = entries(tree)
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_directory_that_others_can_write_is_refused(tree: Path) -> None:
    cache = tree.parent / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(jit.KernelBuildError, match=r"mode 0777.*RLBENCH_CACHE_DIR"):
        build()


def test_default_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLBENCH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_directory() == tmp_path / "xdg" / "rlbench" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert jit.cache_directory() == tmp_path / "home" / ".cache" / "rlbench" / "kernels"


def test_cache_that_cannot_be_written_only_warns(tree: Path) -> None:
    (tree.parent / "cache").write_text("a file")
    with pytest.raises(jit.KernelBuildError, match="not a directory"):
        build()
    (tree.parent / "cache").unlink()
    (tree.parent / "cache").symlink_to("/proc/self/nowhere")
    with pytest.warns(RuntimeWarning, match="not cached"):
        assert not build().from_cache


def test_compile_error_names_kernel_arch_and_line(tree: Path) -> None:
    (tree / "scale.cu").write_text(SOURCE.replace("factor()", "faktor()"))
    with pytest.raises(jit.KernelBuildError) as caught:
        build()
    message = str(caught.value)
    assert "kernel 'scale' for sm_80 (FACTOR=3)" in message
    assert 'scale.cu(4): error: identifier "faktor" is undefined' in message
    assert isinstance(caught.value, RuntimeError)
    assert entries(tree) == []


def test_unknown_names_list_what_there_is(tree: Path) -> None:
    with pytest.raises(jit.KernelBuildError, match=r"no source .*there are \['scale'\]"):
        jit.compile_cubin("scales", arch="sm_80")
    with pytest.raises(jit.KernelBuildError, match=r"'90'.*sm_90a|for 90: arch must look like"):
        jit.compile_cubin("scale", arch="90")
    (tree / "scale.cu").write_text('#include "absent.cuh"')
    with pytest.raises(jit.KernelBuildError, match=r"no header 'absent.cuh'.*inner.cuh"):
        build()
    (tree / "scale.cu").write_text("#include <cuda_bf16.h>")
    with pytest.raises(jit.KernelBuildError, match=r"#include <cuda_bf16.h>"):
        build()
