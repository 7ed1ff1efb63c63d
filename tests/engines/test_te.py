"""What the Transformer Engine's engine asks of the library, and of it twice."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from test_loaders import SCALE, modules, packed, paged, sequences

from rlbench.engines import te
from rlbench.errors import Unavailable, Unsupported
from rlbench.ops._op import Kernel
from rlbench.ops.attention import eager
from rlbench.ops.attention.layouts import pack, pack_backward

FUSED = {
    "use_flash_attention": False,
    "flash_attention_backend": None,
    "use_fused_attention": True,
    "fused_attention_backend": 1,
    "use_unfused_attention": False,
}
UNFUSED = {**FUSED, "use_fused_attention": False, "use_unfused_attention": True}
FLASH = {**FUSED, "use_flash_attention": True, "flash_attention_backend": "2.8.3"}


class Once(torch.autograd.Function):
    """The identity; its backward lets go of what it holds, as FusedAttnFunc's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.tensor_objects = [None]
        ctx.backward_objects = ["sizes"]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if ctx.tensor_objects is None:
            raise AttributeError("ctx must have .tensor_objects to restore saved tensors")
        ctx.tensor_objects = None
        assert ctx.backward_objects == ["sizes"]
        ctx.backward_objects = None
        return grads[0]


class Library:
    """Stands in for the library: computes what TE documents, and keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.chosen: dict[str, Any] = dict(FUSED)
        self.refusal: str | None = None
        monkeypatch.setenv(te.NONDETERMINISTIC, "7")  # so that it is put back
        modules(monkeypatch, te.CHOOSER, _attention_backends=self.chosen)
        pytorch = sys.modules["transformer_engine.pytorch"]
        pytorch.DotProductAttention = self.make  # type: ignore[attr-defined]
        pytorch.get_cudnn_version = lambda: (9, 21, 0)  # type: ignore[attr-defined]

    def make(self, num_attention_heads: int, kv_channels: int, **given: Any) -> torch.nn.Module:
        self.made.append({"heads": num_attention_heads, "dim": kv_channels, **given})
        return Attention(self, given)


class Attention(torch.nn.Module):
    def __init__(self, library: Library, given: dict[str, Any]) -> None:
        super().__init__()
        self.library = library
        self.mask = given["attn_mask_type"]
        self.scale = given["softmax_scale"]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        if self.library.refusal:
            raise ValueError(self.library.refusal)
        state = {"training": self.training, "grads": torch.is_grad_enabled(), **given}
        self.library.calls.append(state)
        q_ends, k_ends = given["cu_seqlens_q"].tolist(), given["cu_seqlens_kv"].tolist()
        rows = []
        for i in range(len(q_ends) - 1):
            queries = q[q_ends[i] : q_ends[i + 1]]
            keys, values = (t[k_ends[i] : k_ends[i + 1]] for t in (k, v))
            if self.mask == "padding_causal":  # aligned at the top left
                keys, values = keys[: len(queries)], values[: len(queries)]
            rows.append(
                eager.attention(
                    *(t.transpose(0, 1)[None] for t in (queries, keys, values)),
                    softmax_scale=self.scale,
                    causal="causal" in self.mask,
                )[0].transpose(0, 1)
            )
        rows.append(q.new_zeros(q.shape[0] - q_ends[-1], *q.shape[1:]))
        out: torch.Tensor = Once.apply(torch.cat(rows))  # type: ignore[no-untyped-call]
        return out.flatten(1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


def load(**options: str) -> Kernel:
    return te.load_attention(options, "cuda:0")


def check_output(call: Any, kernel: Kernel) -> None:
    out, want = kernel.bind(call)()["out"], eager.compute(call)["out"]
    used = sum(call.q_lens)
    assert out.shape == call.q.shape
    assert torch.allclose(out[:used].float(), want[:used].float(), atol=0.02)


def test_whole_sequences_are_one_packed_call_in_inference_mode(library: Library) -> None:
    call = pack(sequences(), SCALE)
    check_output(call, load())
    made = {"qkv_format": "thd", "softmax_scale": SCALE, "num_gqa_groups": 2}
    made |= {"attn_mask_type": "padding_causal", "attention_type": "self"}
    assert library.made == [{"heads": 4, "dim": 8, **made}]
    assert len(library.calls) == 1
    given = library.calls[0]
    assert given["cu_seqlens_q"] is call.cu_seqlens_q
    assert given["cu_seqlens_kv"] is call.cu_seqlens_k
    assert (given["max_seqlen_q"], given["max_seqlen_kv"]) == (20, 20)
    assert (given["training"], given["grads"]) == (False, False)


@pytest.mark.parametrize("spans", [[(0, 9), (12, 20)], [(8, 9), (0, 20)]])
def test_fewer_queries_than_keys_are_aligned_at_the_bottom_right(
    spans: list[tuple[int, int]], library: Library
) -> None:
    """Also where the longest of both are equally long."""
    check_output(pack(sequences(), SCALE, spans), load())
    assert library.made[0]["attn_mask_type"] == "padding_causal_bottom_right"
    assert library.made[0]["attention_type"] == "cross"


@pytest.mark.parametrize("decode", [False, True])
def test_pages_are_copied_out_at_every_run(decode: bool, library: Library) -> None:
    call = paged(decode)
    check_output(call, load())
    run = load().bind(call)
    call.v_cache.fill_(float("nan"))
    assert run()["out"].isnan().all(), "the copy is part of what is timed"
    assert library.calls[-1]["max_seqlen_q"] == (1 if decode else 9)


def test_rows_of_padding_stay_in_the_output(library: Library) -> None:
    check_output(pack(sequences(), SCALE, padding=5), load())


def test_backward_runs_again_without_its_forward(library: Library) -> None:
    call = pack_backward(sequences(), SCALE)
    run = load().bind(call)
    first, second = run(), run()
    assert len(library.calls) == 1, "the forward belongs into the binding"
    assert library.calls[0]["training"] and library.calls[0]["grads"]
    for name, want in eager.compute(call).items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name].float(), want.float(), atol=0.05)


def test_the_stand_in_refuses_a_second_backward_as_te_does() -> None:
    x = torch.ones(2, requires_grad=True)
    y = Once.apply(x)  # type: ignore[no-untyped-call]
    torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)
    with pytest.raises(AttributeError, match="tensor_objects"):
        torch.autograd.grad(y, x, torch.ones(2), retain_graph=True)


def test_what_it_chose_is_told_by_pass_and_shape(library: Library) -> None:
    kernel = load()
    fixed = {
        "cudnn": "9.21.0",
        "deterministic": "False",
        "paged": "keys copied out of the pages at every run",
    }
    assert kernel.resolved == fixed
    kernel.bind(packed())()
    kernel.bind(paged(decode=True))()
    library.chosen.update(UNFUSED)
    kernel.bind(pack_backward(sequences(), SCALE))()
    library.chosen.update(FLASH)
    kernel.bind(packed())()
    assert kernel.resolved.keys() - fixed.keys() == {
        "FusedAttention (cuDNN sub-backend 1), prefill, 4/2 heads of 8",
        "FusedAttention (cuDNN sub-backend 1), decode, 4/2 heads of 8",
        "UnfusedDotProductAttention, backward, 4/2 heads of 8",
        "FlashAttention 2.8.3, prefill, 4/2 heads of 8",
    }


@pytest.mark.parametrize(
    ("cudnn", "major", "told"),
    [((9, 14, 0), 9, True), ((9, 14, 0), 10, False), ((9, 18, 0), 9, False)],
)
def test_a_cudnn_whose_backward_is_known_to_be_wrong_is_told(
    cudnn: tuple[int, ...],
    major: int,
    told: bool,
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformer_engine.pytorch.get_cudnn_version", lambda: cudnn)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (major, 0))
    assert ("issue 2186" in load().resolved.get("backward", "")) is told


@pytest.mark.usefixtures("library")
def test_two_cudnns_in_a_process_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 91900)
    told = load().resolved["cudnn"]
    assert told.startswith("9.21.0, while torch has 9.19.0; CUDNN_HOME")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: 92100)
    assert load().resolved["cudnn"] == "9.21.0"


def test_no_backend_is_unsupported_and_other_errors_stay(library: Library) -> None:
    run = load().bind(packed())
    library.refusal = f"{te.NO_BACKEND} for the provided inputs."
    with pytest.raises(Unsupported, match="no backend for head dim 8"):
        run()
    library.refusal = "something else"
    with pytest.raises(ValueError, match="something else"):
        run()


def test_deterministic_is_said_before_any_module_is_made(library: Library) -> None:
    assert load(deterministic="").resolved["deterministic"] == "True"
    assert os.environ[te.NONDETERMINISTIC] == "0"
    assert load().resolved["deterministic"] == "False"
    assert os.environ[te.NONDETERMINISTIC] == "1"
    assert te.ENGINE.claims_of({}) == []
    claims = te.ENGINE.claims_of({"deterministic": ""})
    assert [claim.property.value for claim in claims] == ["backward_deterministic"]


def test_a_library_that_does_not_load_is_unavailable(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "transformer_engine.pytorch":
                raise FileNotFoundError("Could not find shared object file")

    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(Unavailable, match="shared object file"):
        load()
