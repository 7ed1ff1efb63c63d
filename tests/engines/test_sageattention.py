"""What SageAttention is handed, and what it is not asked because it would answer wrongly."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from rlbench.engines import _triton, sageattention
from rlbench.errors import Unsupported
from rlbench.ops._op import Kernel
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, page

SCALE = 0.25


class Library:
    """Subtracts from the keys in place, as the real one does, and keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def sageattn_varlen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        self.calls.append({"k": k.clone(), "v": v, **given})
        k.sub_(1.0)
        return q * 2


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    module, made = ModuleType("sageattention"), Library()
    module.__dict__["sageattn_varlen"] = made.sageattn_varlen
    monkeypatch.setitem(sys.modules, "sageattention", module)
    monkeypatch.setattr(_triton, "need_c_compiler", lambda: None)
    return made


def sequences(head_dim: int = 64) -> list[Sequence]:
    shape: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": head_dim}
    return [Sequence(i, n, dtype="bf16", device="cpu", **shape) for i, n in enumerate((9, 20))]


def load() -> Kernel:
    return sageattention.load_attention({}, "cuda:0")


def test_keys_are_what_they_were_at_every_run(library: Library) -> None:
    call = pack(sequences(), SCALE)
    run = load().bind(call)
    run()
    assert torch.equal(run()["out"], call.q * 2)
    assert torch.equal(library.calls[1]["k"], call.k), "not what the first run left of them"
    sizes = {"max_seqlen_q": 20, "max_seqlen_k": 20, "is_causal": True, "sm_scale": SCALE}
    assert {name: library.calls[0][name] for name in sizes} == sizes
    assert library.calls[0]["cu_seqlens_q"] is call.cu_seqlens_q


def test_one_query_sees_all_keys_without_a_mask(library: Library) -> None:
    call = page(sequences(), [(8, 9), (19, 20)], SCALE, page_size=16, decode=True)
    load().bind(call)()
    (given,) = library.calls
    assert not given["is_causal"]
    assert given["cu_seqlens_k"].tolist() == [0, 9, 29]
    whole = torch.cat([s.whole("v") for s in sequences()])
    assert torch.equal(given["v"], whole)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (pack(sequences(), SCALE, [(0, 9), (5, 20)]), "as many queries as keys"),
        (pack(sequences(), SCALE, padding=3), "no rows beyond"),
        (pack(sequences(256), SCALE), "head dim 256"),
    ],
)
def test_what_it_would_get_wrong_is_unsupported(call: Any, reason: str, library: Library) -> None:
    with pytest.raises(Unsupported, match=reason):
        load().bind(call)
    assert not library.calls
