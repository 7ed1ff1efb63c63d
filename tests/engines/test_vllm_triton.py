"""What vllm-triton hands to vLLM's kernel, and that a plain id gets what vLLM's backend gives."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from test_loaders import SCALE, modules, packed, paged, sequences

from rlbench.engines import vllm_triton
from rlbench.errors import Unavailable, Unsupported
from rlbench.ops._op import Kernel
from rlbench.ops.attention import eager
from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, pack_backward, page

SHARED = {
    "softmax_scale": SCALE,
    "causal": True,
    "window_size": (-1, -1),
    "softcap": 0,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
}
WORKSPACE = {
    "seq_threshold_3D",
    "num_par_softmax_segments",
    "softmax_segm_output",
    "softmax_segm_max",
    "softmax_segm_expsum",
}


class UnifiedAttention:
    """Keeps its arguments and computes attention from them, into `out`."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> None:
        self.calls.append(given)
        call = PagedPrefill(
            q=given["q"],
            k_cache=given["k"],
            v_cache=given["v"],
            block_table=given["block_table"],
            seqused_k=given["seqused_k"],
            cu_seqlens_q=given["cu_seqlens_q"],
            q_lens=tuple(b - a for a, b in pairwise(given["cu_seqlens_q"].tolist())),
            k_lens=tuple(given["seqused_k"].tolist()),
            softmax_scale=given["softmax_scale"],
            causal=given["causal"],
        )
        given["out"].copy_(eager.compute(call)["out"])


def vllm(monkeypatch: pytest.MonkeyPatch, *, is_batch_invariant: bool = False) -> UnifiedAttention:
    attend = UnifiedAttention()
    modules(
        monkeypatch,
        "vllm.v1.attention.backends.triton_attn",
        MIN_LAUNCH_GRID_SIZE_2D=128,
        NUM_PAR_SOFTMAX_SEGMENTS=16,
    )
    modules(
        monkeypatch,
        "vllm.v1.attention.ops.triton_unified_attention",
        unified_attention=attend,
        is_batch_invariant=is_batch_invariant,
    )
    return attend


def load(**options: str) -> Kernel:
    return vllm_triton.load_attention(options, "cuda:0")


def one_token_each(count: int) -> PackedPrefill:
    some = [
        Sequence(i, 1 + i, dtype="bf16", device="cpu", q_heads=4, kv_heads=2, head_dim=24)
        for i in range(count)
    ]
    return pack(some, SCALE, [(i, 1 + i) for i in range(count)], padding=3)


@pytest.mark.parametrize("options", [{}, {"splits": "1"}])
@pytest.mark.parametrize("decode", [False, True])
def test_paged_calls_have_the_tensors_of_the_call(
    decode: bool, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, call = vllm(monkeypatch), paged(decode)
    run = load(**options).bind(call)
    assert attend.calls == [], "what touches the data belongs into the run"
    out = run()["out"]
    (given,) = attend.calls
    assert out is given["out"]
    tensors = {"q": call.q, "k": call.k_cache, "v": call.v_cache, "seqused_k": call.seqused_k}
    tensors |= {"cu_seqlens_q": call.cu_seqlens_q, "block_table": call.block_table}
    for name, tensor in tensors.items():
        assert given[name] is tensor, name
    plain = {**SHARED, "max_seqlen_q": 1 if decode else 9, "max_seqlen_k": 20}
    assert {name: given[name] for name in plain} == plain
    rest = given.keys() - tensors.keys() - plain.keys() - {"out"}
    assert rest == (WORKSPACE if decode and not options else set())


def test_decode_has_the_workspace_of_vllms_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = vllm(monkeypatch)
    load().bind(paged(decode=True))()
    (given,) = attend.calls
    assert (given["seq_threshold_3D"], given["num_par_softmax_segments"]) == (64, 16)
    shapes = {name: tuple(given[name].shape) for name in WORKSPACE if name.startswith("softmax")}
    assert shapes == {
        "softmax_segm_output": (64, 4, 16, 8),
        "softmax_segm_max": (64, 4, 16),
        "softmax_segm_expsum": (64, 4, 16),
    }
    assert {given[name].dtype for name in shapes} == {torch.float32}


def test_workspace_has_a_row_for_every_query_and_a_power_of_two_of_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = vllm(monkeypatch)
    load().bind(one_token_each(64))()
    (given,) = attend.calls
    assert given["seq_threshold_3D"] == 64
    assert given["softmax_segm_output"].shape == (67, 4, 16, 32)


def test_prefill_goes_through_pages_and_gives_the_packed_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend, call = vllm(monkeypatch), packed()
    out = load().bind(call)()["out"]
    (given,) = attend.calls
    assert given["k"].shape == given["v"].shape == (4, 16, 2, 8)
    assert given["block_table"].tolist() == [[1, 0], [2, 3]]
    assert torch.equal(out, eager.compute(call)["out"])


def test_answers_of_two_calls_stand_in_different_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm(monkeypatch)
    kernel = load()
    some = sequences()
    one, other = page(some, [(0, 9), (0, 20)], SCALE, page_size=16), paged()
    first = kernel.bind(one)()["out"]
    assert kernel.bind(other)()["out"] is not first


def test_backward_is_unsupported_and_resolved_says_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm(monkeypatch)
    with pytest.raises(Unsupported, match="forward only"):
        load().bind(pack_backward(sequences(), SCALE))
    assert load().resolved["num_splits"].startswith("16 with one query a sequence and at most 128")
    assert load(splits="1").resolved["num_splits"] == "1"
    assert load().resolved["prefill"] == "keys and values put into pages of 16 when bound"


def test_batch_invariant_mode_makes_the_plain_id_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel would ignore the workspace: a report would call `splits=1` by the plain name."""
    attend = vllm(monkeypatch, is_batch_invariant=True)
    with pytest.raises(Unavailable, match="VLLM_BATCH_INVARIANT is set"):
        load()
    load(splits="1").bind(paged())()
    assert len(attend.calls) == 1


def test_claims_hold_with_one_split_only() -> None:
    assert vllm_triton.ENGINE.claims_of({}) == []
    claims = vllm_triton.ENGINE.claims_of({"splits": "1"})
    assert [c.property.value for c in claims] == ["batch_invariant"]
