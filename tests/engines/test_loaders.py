"""What the loaders of GPU engines hand to the real libraries, seen by stand-ins for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

from rlbench.engines import fa2, fa3, fa4
from rlbench.engines import rlbench as own
from rlbench.errors import Unavailable, Unsupported
from rlbench.ops._op import Kernel
from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, pack_backward, page

SCALE = 0.25


class Recorder:
    """A library function that keeps its arguments and answers with a tensor of its own."""

    def __init__(self, *, with_lse: bool = False) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.answers: list[torch.Tensor] = []
        self._with_lse = with_lse

    def __call__(self, *args: Any, **given: Any) -> Any:
        self.calls.append((args, given))
        self.answers.append(args[0] * 2)
        return (self.answers[-1], None) if self._with_lse else self.answers[-1]


def modules(monkeypatch: pytest.MonkeyPatch, dotted: str, **contents: Any) -> ModuleType:
    """Put `dotted`, with its parents, into sys.modules; `contents` into the last."""
    names = dotted.split(".")
    parent: ModuleType | None = None
    for i, name in enumerate(names):
        module = ModuleType(".".join(names[: i + 1]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if parent is not None:
            setattr(parent, name, module)
        parent = module
    assert parent is not None
    for key, value in contents.items():
        setattr(parent, key, value)
    return parent


def sequences() -> list[Sequence]:
    return [
        Sequence(i, n, dtype="bf16", device="cpu", q_heads=4, kv_heads=2, head_dim=8)
        for i, n in enumerate((9, 20))
    ]


def packed() -> PackedPrefill:
    return pack(sequences(), SCALE, [(0, 9), (12, 20)])


def paged(decode: bool = False) -> PagedPrefill:
    spans = [(8, 9), (19, 20)] if decode else [(0, 9), (12, 20)]
    return page(sequences(), spans, SCALE, page_size=4, decode=decode)


def assert_called(
    recorder: Recorder, tensors: tuple[torch.Tensor, ...], expected: Mapping[str, Any]
) -> None:
    """The last call had exactly these: the very tensors, no copies, and nothing else."""
    args, given = recorder.calls[-1]
    assert len(args) == len(tensors)
    assert all(a is b for a, b in zip(args, tensors, strict=True))
    assert sorted(given) == sorted(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert given[name] is value, name
        else:
            assert (given[name], type(given[name])) == (value, type(value)), name


# --- vLLM's FlashAttention-2 and -3 ---------------------------------------------------------------


def vllm(monkeypatch: pytest.MonkeyPatch, reason: str | None = None) -> Recorder:
    recorder = Recorder()
    modules(
        monkeypatch,
        "vllm.vllm_flash_attn.flash_attn_interface",
        flash_attn_varlen_func=recorder,
        FA2_UNAVAILABLE_REASON=reason,
        FA3_UNAVAILABLE_REASON=reason,
    )
    return recorder


VLLM = [(fa2, 2), (fa3, 3)]


@pytest.mark.parametrize(("options", "splits"), [({}, 0), ({"splits": "1"}, 1)])
@pytest.mark.parametrize(("engine", "version"), VLLM)
def test_vllm_prefill_has_the_packed_arguments(
    engine: Any,
    version: int,
    options: Mapping[str, str],
    splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, call = vllm(monkeypatch), packed()
    out = engine.load_attention(options, "cuda:0").bind(call)()
    assert out["out"] is recorder.answers[-1]
    assert_called(
        recorder,
        (call.q, call.k, call.v),
        {
            "max_seqlen_q": 9,
            "cu_seqlens_q": call.cu_seqlens_q,
            "max_seqlen_k": 20,
            "cu_seqlens_k": call.cu_seqlens_k,
            "softmax_scale": SCALE,
            "causal": True,
            "num_splits": splits,
            "fa_version": version,
        },
    )


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("engine", "version"), VLLM)
def test_vllm_paged_calls_have_the_table_and_no_key_offsets(
    engine: Any, version: int, decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, call = vllm(monkeypatch), paged(decode)
    out = engine.load_attention({}, "cuda:0").bind(call)()
    assert out["out"] is recorder.answers[-1]
    assert_called(
        recorder,
        (call.q, call.k_cache, call.v_cache),
        {
            "max_seqlen_q": 1 if decode else 9,
            "cu_seqlens_q": call.cu_seqlens_q,
            "max_seqlen_k": 20,
            "seqused_k": call.seqused_k,
            "block_table": call.block_table,
            "softmax_scale": SCALE,
            "causal": True,
            "num_splits": 0,
            "fa_version": version,
        },
    )


@pytest.mark.parametrize(("engine", "version"), VLLM)
def test_vllm_is_forward_only_and_tells_its_splits(
    engine: Any, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm(monkeypatch)
    kernel: Kernel = engine.load_attention({}, "cuda:0")
    with pytest.raises(Unsupported, match="forward only"):
        kernel.bind(pack_backward(sequences(), SCALE))
    assert kernel.resolved == {"num_splits": "auto"}
    assert engine.load_attention({"splits": "1"}, "cuda:0").resolved == {"num_splits": "1"}


@pytest.mark.parametrize(("engine", "version"), VLLM)
def test_vllm_extension_that_does_not_load_is_unavailable_with_its_reason(
    engine: Any, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm(monkeypatch, reason="undefined symbol: cudaFoo")
    with pytest.raises(Unavailable, match=f"FlashAttention-{version}.*undefined symbol: cudaFoo"):
        engine.load_attention({}, "cuda:0")


def test_vllm_claims_hold_with_one_split_only() -> None:
    for engine in (fa2.ENGINE, fa3.ENGINE):
        assert engine.claims_of({}) == []
        assert [c.property.value for c in engine.claims_of({"splits": "1"})] == ["batch_invariant"]


# --- FlashAttention-4 -----------------------------------------------------------------------------


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(("options", "deterministic"), [({}, False), ({"deterministic": ""}, True)])
def test_fa4_prefill_has_the_packed_arguments(
    options: Mapping[str, str],
    deterministic: bool,
    with_lse: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, call = Recorder(with_lse=with_lse), packed()
    modules(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=recorder)
    out = fa4.load_attention(options, "cuda:0").bind(call)()
    assert out["out"] is recorder.answers[-1]
    assert_called(
        recorder,
        (call.q, call.k, call.v),
        {
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_k": call.cu_seqlens_k,
            "max_seqlen_q": 9,
            "max_seqlen_k": 20,
            "softmax_scale": SCALE,
            "causal": True,
            "deterministic": deterministic,
        },
    )


@pytest.mark.parametrize("decode", [False, True])
def test_fa4_paged_calls_have_the_page_table(decode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, call = Recorder(with_lse=True), paged(decode)
    modules(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=recorder)
    out = fa4.load_attention({}, "cuda:0").bind(call)()
    assert out["out"] is recorder.answers[-1]
    assert_called(
        recorder,
        (call.q, call.k_cache, call.v_cache),
        {
            "cu_seqlens_q": call.cu_seqlens_q,
            "max_seqlen_q": 1 if decode else 9,
            "max_seqlen_k": 20,
            "seqused_k": call.seqused_k,
            "page_table": call.block_table,
            "softmax_scale": SCALE,
            "causal": True,
        },
    )


def test_fa4_backward_runs_the_forward_once_and_differentiates_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[bool] = []

    def sum_of_squares(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool, **_: Any
    ) -> tuple[torch.Tensor, None]:
        calls.append(deterministic)
        return q * 2 + k.sum() * 3 + v.sum() * 4, None

    modules(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=sum_of_squares)
    call = pack_backward(sequences(), SCALE)
    run = fa4.load_attention({"deterministic": ""}, "cuda:0").bind(call)
    assert calls == [True], "the forward belongs into the binding"
    first, second = run(), run()
    assert calls == [True]
    assert torch.equal(first["dq"], call.dout * 2)
    assert all(torch.equal(first[name], second[name]) for name in ("dq", "dk", "dv"))
    assert first["dk"].shape == call.k.shape


# --- rlbench --------------------------------------------------------------------------------------


def test_rlbench_hands_over_packed_and_paged_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlbench import kernels

    recorder = Recorder()
    monkeypatch.setattr(kernels, "attention", recorder)
    kernel = own.load_attention({}, "cuda:0")
    call = packed()
    assert kernel.bind(call)()["out"] is recorder.answers[-1]
    shared = {"softmax_scale": SCALE, "causal": True}
    assert_called(
        recorder,
        (call.q, call.k, call.v),
        {
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_k": call.cu_seqlens_k,
            "max_seqlen_q": 9,
            "max_seqlen_k": 20,
            **shared,
        },
    )
    for decode in (False, True):
        cached = paged(decode)
        assert kernel.bind(cached)()["out"] is recorder.answers[-1]
        assert_called(
            recorder,
            (cached.q, cached.k_cache, cached.v_cache),
            {
                "cu_seqlens_q": cached.cu_seqlens_q,
                "max_seqlen_q": 1 if decode else 9,
                "max_seqlen_k": 20,
                "block_table": cached.block_table,
                "seqused_k": cached.seqused_k,
                **shared,
            },
        )


def test_nothing_is_launched_by_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What touches the data belongs into the run, because that is what is timed."""
    recorder = vllm(monkeypatch)
    fa3.load_attention({}, "cuda:0").bind(packed())
    assert recorder.calls == []
