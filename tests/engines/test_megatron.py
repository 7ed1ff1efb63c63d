"""What Megatron-core's DotProductAttention is handed: one sequence at a time, and which mask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_loaders import SCALE, modules, packed, paged, sequences

from rlbench.engines import megatron
from rlbench.ops._op import Kernel
from rlbench.ops.attention import eager
from rlbench.ops.attention.layouts import pack, pack_backward

CAUSAL, NO_MASK = "causal", "no mask"


class Library:
    """Stands in for the library: its masks are its own, and it keeps what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list[dict[str, Any]] = []
        self.made: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.started: list[Any] = []
        contents: dict[str, dict[str, Any]] = {
            "tensor_parallel": {"model_parallel_cuda_manual_seed": self.seed},
            "transformer.dot_product_attention": {"DotProductAttention": self.make},
            "transformer.enums": {"AttnMaskType": SimpleNamespace(causal=CAUSAL, no_mask=NO_MASK)},
            "transformer.transformer_config": {"TransformerConfig": self.config},
            "parallel_state": {
                "model_parallel_is_initialized": lambda: "groups" in self.started,
                "initialize_model_parallel": lambda: self.started.append("groups"),
            },
        }
        for name, inner in contents.items():
            modules(monkeypatch, f"megatron.core.{name}", **inner)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: "world" in self.started)
        monkeypatch.setattr(torch.distributed, "init_process_group", self.init_process_group)

    def seed(self, seed: int, **given: Any) -> None:
        self.started.append(given)

    def init_process_group(self, backend: str, **given: Any) -> None:
        assert (given["rank"], given["world_size"]) == (0, 1)
        assert type(given["store"]).__name__ == "HashStore", "no port, no file"
        self.started.append("world")

    def config(self, **given: Any) -> dict[str, Any]:
        self.configs.append(given)
        return given

    def make(self, config: dict[str, Any], **given: Any) -> torch.nn.Module:
        self.made.append(given)
        return Attention(self, given)


class Attention(torch.nn.Module):
    def __init__(self, library: Library, given: dict[str, Any]) -> None:
        super().__init__()
        self.library = library
        self.given = given

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[tokens, 1, heads, dim] -> [tokens, 1, heads · dim]."""
        seen = {"shapes": (tuple(q.shape), tuple(k.shape), tuple(v.shape)), "mask": mask}
        self.library.calls.append({**seen, "training": self.training})
        causal = self.given["attn_mask_type"] == CAUSAL
        if causal and mask is None and len(q) > 1:
            assert len(q) == len(k), "causal mask is only for self attention"
            mask = eager.hidden(len(q), len(q), q.device)
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        scores = torch.einsum("qbhd,kbhd->bhqk", q.float(), k.float()) * self.given["softmax_scale"]
        if mask is not None:
            scores = scores.masked_fill(mask, -10000.0)
        out = torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v.float())
        return out.to(q.dtype).flatten(2)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


def load() -> Kernel:
    return megatron.load_attention({}, "cuda:0")


def check_output(call: Any) -> None:
    out, want = load().bind(call)()["out"], eager.compute(call)["out"]
    used = sum(call.q_lens)
    assert out.shape == call.q.shape
    assert torch.allclose(out[:used].float(), want[:used].float(), atol=0.02)


def test_each_sequence_is_a_launch_with_the_librarys_own_mask(library: Library) -> None:
    check_output(pack(sequences(), SCALE))
    shapes = [call["shapes"] for call in library.calls]
    assert shapes == [((n, 1, 4, 8), (n, 1, 2, 8), (n, 1, 2, 8)) for n in (9, 20)]
    assert [call["mask"] for call in library.calls] == [None, None]
    assert not any(call["training"] for call in library.calls)


def test_the_layer_is_the_cases(library: Library) -> None:
    load().bind(pack(sequences(), SCALE))
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8}
    types = {"bf16": True, "fp16": False}
    assert library.configs == [{"num_layers": 1, **sizes, "attention_dropout": 0.0, **types}]
    made = {"layer_number": 1, "attn_mask_type": CAUSAL, "attention_type": "self"}
    assert library.made == [{**made, "softmax_scale": SCALE}]


def test_fewer_queries_than_keys_get_a_bottom_right_aligned_mask(library: Library) -> None:
    check_output(packed())
    first, second = (call["mask"] for call in library.calls)
    assert first is None
    assert torch.equal(second, eager.hidden(8, 20, torch.device("cpu")))


@pytest.mark.parametrize("decode", [False, True])
def test_pages_are_copied_out_at_every_run(decode: bool, library: Library) -> None:
    call = paged(decode)
    check_output(call)
    run = load().bind(call)
    call.v_cache.fill_(float("nan"))
    assert run()["out"].isnan().all(), "the copy is part of what is timed"
    if decode:
        assert [c["shapes"][0][0] for c in library.calls[-2:]] == [1, 1]
        assert [c["mask"] for c in library.calls[-2:]] == [None, None], "one query sees all keys"


def test_rows_of_padding_stay_in_the_output(library: Library) -> None:
    check_output(pack(sequences(), SCALE, padding=5))


def test_backward_runs_again_without_its_forward(library: Library) -> None:
    call = pack_backward(sequences(), SCALE)
    run = load().bind(call)
    first, second = run(), run()
    assert [c["training"] for c in library.calls] == [True, True], "one forward a sequence"
    for name, want in eager.compute(call).items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name].float(), want.float(), atol=0.05)


def test_the_world_of_one_is_made_once(library: Library) -> None:
    load()
    load()
    assert library.started == ["world", "groups", *[{"inference_rng_tracker": True}] * 2]
