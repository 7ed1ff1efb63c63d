"""Every build of every kernel, for three architectures, without a GPU: it compiles and fits."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING

import pytest

from rlbench.kernels import jit
from rlbench.kernels.attention import backward, builds, combine, decode, generic, prefill, stream
from rlbench.kernels.attention.request import BLOCK_KEYS

if TYPE_CHECKING:
    from pathlib import Path

    from rlbench.kernels.attention.launch import Build

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC: pip install 'rlbench[kernels]'")

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
NEEDS: dict[type[Build], tuple[str, ...]] = {
    decode.Variant: ("sm_90a", "sm_100a"),
    combine.Variant: ("sm_90a", "sm_100a"),
    stream.Variant: ("sm_90a", "sm_100a"),
    prefill.Variant: ("sm_90a",),
    backward.HopperQueries: ("sm_90a",),
    backward.WideHopperQueries: ("sm_90a",),
    backward.HopperKeys: ("sm_90a",),
    backward.WideHopperKeys: ("sm_90a",),
}
BUILDS = [
    (arch, build)
    for arch in ARCHITECTURES
    for build in builds()
    if arch in NEEDS.get(type(build), ARCHITECTURES)
]
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBENCH_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("arch", "build"), BUILDS, ids=[f"{arch}-{build.kernel}" for arch, build in BUILDS]
)
def test_builds_without_spills(arch: str, build: Build) -> None:
    cubin = jit.compile_cubin(build.source, arch=arch, defines=build.defines)
    usage = cubin.usage()
    assert (usage.spill_store_bytes, usage.spill_load_bytes) == (0, 0), cubin.log
    assert usage.stack_bytes == 0, cubin.log
    assert cubin.warnings() == [], cubin.log
    # C7515 (wgmma serialized) and C7508 (setmaxnreg ignored) may come as information.
    assert "serialized" not in cubin.log.lower()
    assert "setmaxnreg" not in cubin.log.lower()
    assert build.kernel.encode() in cubin.code


@pytest.mark.parametrize(
    "build", [v for v in prefill.variants() if v.element == "Bf16"], ids=lambda v: v.kernel
)
def test_the_softmax_does_not_wait_for_products(build: prefill.Variant) -> None:
    # ptxas would have all of them waited for first. Opcodes of sm_90a, in 16 bytes each.
    warpgroup, exp2, maximum, rounding = 0x9C5, 0x308, 0x209, 0x23E
    code = jit.compile_cubin(build.source, arch="sm_90a", defines=build.defines).code
    opcodes = [low & 0xFFF for low, _ in struct.iter_unpack("<QQ", code[: len(code) // 16 * 16])]
    at = [i for i, opcode in enumerate(opcodes) if opcode == warpgroup]
    # Products start, S(0) is waited for, S(j) and P V start, S(j) is waited for, and O.
    parts = [opcodes[i:j] for i, j in itertools.pairwise(at)][:6]
    weights = BLOCK_KEYS[build.head_dim] // 2  # of a thread
    counts = [part.count(exp2) for part in parts]
    assert counts[1] >= weights
    assert counts[4] + counts[5] >= weights
    assert all(count < weights // 2 for count in (counts[0], *counts[2:5]))
    # Nearly all of the maxima come before O is waited for, ...
    assert parts[4].count(maximum) > weights * 3 // 4
    # ... and after that weights are rounded while there are exponentials to come.
    in_the_middle = [i for i, opcode in enumerate(parts[5]) if opcode == exp2][weights // 2]
    assert parts[5][:in_the_middle].count(rounding) >= weights // 8


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shared_memory_fits(arch: str) -> None:
    for their_arch, build in BUILDS:
        assert their_arch != arch or build.shared_bytes <= SHARED_LIMIT[arch]
    # An SM has 228 KiB, and each block takes another one of them: two blocks fit at head dim 64.
    for build in stream.variants():
        blocks = 2 if build.head_dim == 64 else 1
        assert blocks * (build.shared_bytes + 1024) <= 228 * 1024
    # GPUs with the least shared memory (8.6, 8.9, 12.0) have 99 KiB for a block.
    assert all(
        min(v.shared_bytes for v in generic.variants() if v.head_dim == head_dim) <= 99 * 1024
        for head_dim in (64, 128, 256)
    )


def test_a_spill_would_be_seen() -> None:
    log = (
        "ptxas warning : Registers are spilled to local memory in function 'k', 8 bytes ...\n"
        "ptxas         .     8 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    cubin = jit.Cubin("k", "sm_80", b"", log, from_cache=False)
    assert cubin.usage() == jit.Usage(255, 8, 8, 4)
    assert len(cubin.warnings()) == 1
