"""What FlashInfer's wrappers are planned and run with, seen by stand-ins for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from rlbench.engines import flashinfer as engine
from rlbench.errors import Unavailable, Unsupported
from rlbench.ops._op import Kernel
from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, pack_backward, page

SCALE = 0.25
DTYPES = {"sm_scale": SCALE, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
PAGED = "BatchPrefillWithPagedKVCacheWrapper"
DECODE = "BatchDecodeWithPagedKVCacheWrapper"


class Wrapper:
    """A wrapper that keeps what it was made, planned and run with."""

    name = ""
    made: list[Wrapper]
    needs = 0
    complaint = ""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **given: Any) -> None:
        self.workspace, self.kv_layout, self.given = workspace, kv_layout, given
        self.plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.runs: list[tuple[Any, ...]] = []
        self.made.append(self)

    def plan(self, *args: Any, **given: Any) -> None:
        if len(self.workspace) < self.needs:
            raise RuntimeError(f"Error in function 'aligned_alloc': {self.complaint}")
        self.plans.append((args, given))

    def run(self, q: torch.Tensor, *kv: Any, out: torch.Tensor) -> torch.Tensor:
        assert q.shape == out.shape
        self.runs.append((q, *kv))
        return out.copy_(q * 2)


@pytest.fixture
def wrappers(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    """Stand-ins for flashinfer's wrappers, on a device of compute capability 9.0."""

    class Base(Wrapper):
        made: list[Wrapper] = []  # noqa: RUF012

    library = ModuleType("flashinfer")
    for name in (RAGGED, PAGED, DECODE):
        setattr(library, name, type(name, (Base,), {"name": name}))
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(engine, "WORKSPACE_BYTES", 1024)
    return Base


def load(*flags: str, backend: str = "fa2", **options: str) -> Kernel:
    return engine.load_attention({"backend": backend, **options, **dict.fromkeys(flags, "")}, "cpu")


def sequences(head_dim: int = 64) -> list[Sequence]:
    return [
        Sequence(i, n, dtype="bf16", device="cpu", q_heads=4, kv_heads=2, head_dim=head_dim)
        for i, n in enumerate((8, 21))
    ]


def packed(padding: int = 0, head_dim: int = 64) -> PackedPrefill:
    return pack(sequences(head_dim), SCALE, [(0, 8), (12, 21)], padding=padding)


def paged(decode: bool = False, shuffled: bool = False) -> PagedPrefill:
    spans = [(7, 8), (20, 21)] if decode else [(0, 8), (12, 21)]
    return page(sequences(), spans, SCALE, page_size=4, decode=decode, shuffled=shuffled)


def the_one(wrappers: type[Wrapper], name: str, backend: str) -> Wrapper:
    """The only wrapper made, of that kind and backend."""
    [wrapper] = wrappers.made
    assert (wrapper.name, wrapper.kv_layout) == (name, "NHD")
    tensor_cores = {"use_tensor_cores": True} if name == DECODE else {}
    assert wrapper.given == {"backend": backend, **tensor_cores}
    return wrapper


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_packed_prefill_is_planned_when_bound_and_run_on_the_very_tensors(
    wrappers: type[Wrapper], backend: str
) -> None:
    call = packed()
    run = load(backend=backend).bind(call)
    wrapper = the_one(wrappers, RAGGED, backend)
    [(args, given)] = wrapper.plans
    assert args[0] is call.cu_seqlens_q and args[1] is call.cu_seqlens_k
    assert args[2:] == (4, 2, 64)
    assert given == {"causal": True, **DTYPES}
    assert wrapper.runs == [], "what touches the data belongs into the run"
    for _ in range(2):
        assert torch.equal(run()["out"], call.q * 2)
    assert len(wrapper.plans) == 1
    q, k, v = wrapper.runs[-1]
    assert q.data_ptr() == call.q.data_ptr() and q.shape == call.q.shape
    assert k is call.k and v is call.v


def test_mask_that_is_not_causal_is_planned_so(wrappers: type[Wrapper]) -> None:
    load().bind(replace(packed(), causal=False))
    assert wrappers.made[0].plans[0][1]["causal"] is False


def test_padding_rows_are_kept_from_a_wrapper_that_refuses_them(wrappers: type[Wrapper]) -> None:
    call = packed(padding=5)
    out = load().bind(call)()["out"]
    assert out.shape == call.q.shape == (22, 4, 64)
    assert torch.equal(out[:17], call.q[:17] * 2)
    assert wrappers.made[0].runs[0][0].shape == (17, 4, 64)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("decode", "name", "own"), [(False, PAGED, {"causal": True}), (True, DECODE, {})]
)
def test_paged_calls_are_planned_with_the_pages_in_use(
    wrappers: type[Wrapper], decode: bool, name: str, own: dict[str, Any], shuffled: bool
) -> None:
    call = paged(decode, shuffled)
    out = load().bind(call)()["out"]
    assert torch.equal(out, call.q * 2)
    wrapper = the_one(wrappers, name, "fa2")
    [(args, given)] = wrapper.plans
    if not decode:
        assert args[0] is call.cu_seqlens_q
        args = args[1:]
    indptr, indices, last = args[:3]
    assert indptr.tolist() == [0, 2, 8]
    assert indices.tolist() == [*call.block_table[0, :2].tolist(), *call.block_table[1].tolist()]
    assert last.tolist() == [4, 1], "8 tokens fill two pages of 4, of 21 the sixth holds one"
    assert {t.dtype for t in args[:3]} == {torch.int32}
    assert args[3:] == (4, 2, 64, 4)
    assert given == {**own, **DTYPES}
    [(_, cache)] = wrapper.runs
    assert cache[0] is call.k_cache and cache[1] is call.v_cache


def test_fixed_split_size_is_given_in_pages_and_planned_in_tokens_where_there_are_none(
    wrappers: type[Wrapper],
) -> None:
    kernel = load(fixed_split_size="512")
    for call in (packed(), paged(), paged(decode=True)):
        kernel.bind(call)
    sizes = [wrapper.plans[0][1]["fixed_split_size"] for wrapper in wrappers.made]
    assert sizes == [512, 128, 128]
    assert "disable_split_kv" not in wrappers.made[0].plans[0][1]
    with pytest.raises(Unsupported, match="whole pages, these have 4 tokens"):
        load(fixed_split_size="510").bind(paged())


def test_splitting_is_disabled_in_every_plan(wrappers: type[Wrapper]) -> None:
    kernel = load("disable_split_kv")
    for call in (packed(), paged(), paged(decode=True)):
        kernel.bind(call)
    assert [w.plans[0][1]["disable_split_kv"] for w in wrappers.made] == [True] * 3
    assert "fixed_split_size" not in wrappers.made[0].plans[0][1]


def test_options_that_plan_would_ignore_are_unsupported(wrappers: type[Wrapper]) -> None:
    with pytest.raises(Unsupported, match="fa3 backend ignores fixed_split_size"):
        load(backend="fa3", fixed_split_size="512")
    with pytest.raises(Unsupported, match="fa3 backend ignores disable_split_kv"):
        load("disable_split_kv", backend="fa3")
    with pytest.raises(Unsupported, match="ignores fixed_split_size when disable_split_kv"):
        load("disable_split_kv", fixed_split_size="512")


def test_fa3_is_unavailable_on_other_devices_than_hopper(
    wrappers: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    for capability in ((8, 9), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        load(backend="fa2")
        with pytest.raises(Unavailable, match=rf"9\.x, this device has {capability[0]}\."):
            load(backend="fa3")


def test_fa3_has_no_kernel_for_other_head_dims(wrappers: type[Wrapper]) -> None:
    load(backend="fa2").bind(packed(head_dim=96))
    with pytest.raises(Unsupported, match="no kernel for head dim 96"):
        load(backend="fa3").bind(packed(head_dim=96))


def test_two_runs_share_the_workspace_and_no_plan(wrappers: type[Wrapper]) -> None:
    kernel = load()
    first, second = kernel.bind(packed()), kernel.bind(packed())
    one, other = wrappers.made
    assert one.workspace is other.workspace
    assert one.workspace.tolist() == [0] * 1024
    first()
    second()
    assert len(one.runs) == len(other.runs) == 1


def test_workspace_grows_until_the_plan_fits(wrappers: type[Wrapper]) -> None:
    kernel = load(fixed_split_size="512")
    kernel.bind(packed())
    wrappers.needs = 3000
    wrappers.complaint = f"{engine.OVERFLOW}v with size 3000 and alignment 16"
    run = kernel.bind(packed())
    planned = [len(w.workspace) for w in wrappers.made if w.plans]
    assert planned == [1024, 4096]
    run()
    assert wrappers.made[-1].runs


@pytest.mark.parametrize("complaint", ["allocating memory for batch_prefill_o_indptr", "Ninja"])
def test_another_failure_of_a_plan_is_not_taken_for_a_small_workspace(
    wrappers: type[Wrapper], complaint: str
) -> None:
    wrappers.needs, wrappers.complaint = 2000, complaint
    with pytest.raises(RuntimeError, match=complaint):
        load().bind(packed())


def test_backward_is_unsupported(wrappers: type[Wrapper]) -> None:
    with pytest.raises(Unsupported, match="forward only"):
        load().bind(pack_backward(sequences(), SCALE))


def test_resolved_says_how_keys_are_split(wrappers: type[Wrapper]) -> None:
    kernels = [
        load(),
        load(backend="fa3"),
        load("disable_split_kv"),
        load(fixed_split_size="4096"),
    ]
    assert [k.resolved["split_kv"] for k in kernels] == [
        "auto",
        "never",
        "never",
        "every 4096 tokens",
    ]
    assert [k.resolved["backend"] for k in kernels] == ["fa2", "fa3", "fa2", "fa2"]


def test_every_variant_loads_and_a_fixed_split_size_is_the_one_promise(
    wrappers: type[Wrapper],
) -> None:
    for variant in engine.ENGINE.variants:
        options = dict(variant)
        engine.load_attention(options, "cpu")
        claimed = [c.property.value for c in engine.ENGINE.claims_of(options)]
        assert claimed == (["batch_invariant"] if "fixed_split_size" in options else [])
