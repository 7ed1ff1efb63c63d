"""torch-eager and torch-sdpa on the CPU: right, and invariant where they answer at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlbench.engines import _torch_sdpa, torch_eager, torch_sdpa
from rlbench.errors import Unsupported
from rlbench.measure.bits import digest
from rlbench.ops._op import Kernel
from rlbench.ops.attention import reference
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, pack_backward, page

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SCALE = 64**-0.5
LENGTHS = (70, 33, 70)
SPANS = [(0, 70), (20, 33), (69, 70)]
ENGINES = ["eager", "flash", "math"]


def kernel(name: str) -> Kernel:
    if name == "eager":
        return torch_eager.load_attention({}, "cpu")
    return torch_sdpa.load_attention({"backend": name}, "cpu")


def sequences(dtype: str, kv_heads: int = 2) -> list[Sequence]:
    shape: dict[str, Any] = {"q_heads": 4, "kv_heads": kv_heads, "head_dim": 64}
    return [Sequence(i, n, dtype=dtype, device="cpu", **shape) for i, n in enumerate(LENGTHS)]


def assert_rounded(found: torch.Tensor, ref: torch.Tensor, dtype: str, factor: float) -> None:
    assert found.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert found.shape == ref.shape
    error = (found.double() - ref).norm() / ref.norm()
    assert float(error) < factor * UNIT[dtype]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ENGINES)
def test_forward_is_the_reference_but_for_rounding(name: str, kv_heads: int, dtype: str) -> None:
    one = sequences(dtype, kv_heads)
    last = [(n - 1, n) for n in LENGTHS]
    for call in (
        pack(one, SCALE),
        pack(one, SCALE, SPANS),
        pack(one, SCALE, padding=5),
        page(one, SPANS, SCALE, page_size=16, shuffled=True),
        page(one, last, SCALE, page_size=32, decode=True),
    ):
        out = kernel(name).bind(call)()["out"]
        rows = sum(call.q_lens)
        assert_rounded(out[:rows], reference.forward(call)["out"][:rows], dtype, 3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", ENGINES)
def test_backward_is_the_reference_but_for_rounding(name: str, kv_heads: int, dtype: str) -> None:
    call = pack_backward(sequences(dtype, kv_heads), SCALE)
    found, expected = kernel(name).bind(call)(), reference.backward(call)
    assert list(found) == ["dq", "dk", "dv"]
    for tensor, gradient in found.items():
        assert_rounded(gradient, expected[tensor], dtype, 6)


@pytest.mark.parametrize("name", ENGINES)
def test_a_run_can_be_repeated_and_leaves_its_inputs_alone(name: str) -> None:
    call = pack_backward(sequences("bf16"), SCALE)
    before = [digest(t) for t in (call.q, call.k, call.v, call.dout)]
    run = kernel(name).bind(call)
    assert {n: digest(t) for n, t in run().items()} == {n: digest(t) for n, t in run().items()}
    assert [digest(t) for t in (call.q, call.k, call.v, call.dout)] == before
    assert not call.q.requires_grad


@pytest.mark.parametrize("backend", torch_sdpa.CUDA_ONLY)
def test_backend_that_needs_cuda_says_so_on_the_cpu(backend: str) -> None:
    with pytest.raises(Unsupported, match=f"{backend} backend runs on CUDA devices only"):
        torch_sdpa.load_attention({"backend": backend}, "cpu")


def test_every_backend_is_a_variant_and_known_to_torch() -> None:
    assert [dict(v) for v in torch_sdpa.ENGINE.variants] == [
        {"backend": "flash"},
        {"backend": "cudnn"},
        {"backend": "efficient"},
        {"backend": "math"},
    ]
    assert list(_torch_sdpa.BACKENDS) == ["flash", "cudnn", "efficient", "math"]
    assert kernel("flash").resolved["backend"] == "flash"


def test_refusal_of_the_pinned_backend_is_unsupported_with_the_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(_torch_sdpa, "scaled_dot_product_attention", refuse)
    run = kernel("flash").bind(pack(sequences("bf16")[:1], SCALE))
    with pytest.raises(Unsupported, match=r"flash backend has no kernel for Lq=70, Lk=70, D=64"):
        run()


def test_other_errors_of_sdpa_stay_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(_torch_sdpa, "scaled_dot_product_attention", fail)
    run = kernel("math").bind(pack(sequences("bf16")[:1], SCALE))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run()


def test_only_whole_sequences_are_called_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_causal` aligns top-left where lengths differ; bottom-right needs a mask."""
    real = torch.nn.functional.scaled_dot_product_attention
    seen: list[tuple[int, int, bool, bool]] = []

    def watch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: object) -> torch.Tensor:
        masked = given.get("attn_mask") is not None
        seen.append((q.shape[2], k.shape[2], bool(given.get("is_causal")), masked))
        return real(q, k, v, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(_torch_sdpa, "scaled_dot_product_attention", watch)
    kernel("math").bind(pack(sequences("bf16"), SCALE, SPANS))()
    assert seen == [(70, 70, True, False), (13, 33, False, True), (1, 70, False, False)]
