"""The fp64 reference against an implementation of its own kind, and plain torch against both."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlbench.measure.bits import digest
from rlbench.ops.attention import eager, reference
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import cumulative, pack, pack_backward, page

HEADS = [(4, 2, 16), (3, 3, 8), (5, 1, 8), (2, 2, 4)]
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def sequences(lengths: tuple[int, ...], heads: tuple[int, int, int], dtype: str) -> list[Sequence]:
    shape: dict[str, Any] = dict(zip(("q_heads", "kv_heads", "head_dim"), heads, strict=True))
    return [Sequence(i, n, dtype=dtype, device="cpu", **shape) for i, n in enumerate(lengths)]


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    """Row by row and head by head: no mask, no batch, no block; a row without keys is zero."""
    q_len, q_heads, _ = q.shape
    k_len, kv_heads, _ = k.shape
    out = []
    for i in range(q_len):
        seen = i + k_len - q_len + 1 if causal else k_len
        line = []
        for h in range(q_heads):
            kv = h // (q_heads // kv_heads)
            if seen <= 0:
                line.append(torch.zeros_like(q[i, h]))
                continue
            scores = k[:seen, kv] @ q[i, h] * scale
            weights = (scores - scores.max()).exp()
            line.append(weights @ v[:seen, kv] / weights.sum())
        out.append(torch.stack(line))
    return torch.stack(out)


def naive_packed(call: PackedPrefill, *tensors: torch.Tensor) -> torch.Tensor:
    pieces, q_at, k_at = [], 0, 0
    q, k, v = tensors
    for q_len, k_len in zip(call.q_lens, call.k_lens, strict=True):
        keys = slice(k_at, k_at + k_len)
        piece = naive(q[q_at : q_at + q_len], k[keys], v[keys], call.softmax_scale, call.causal)
        pieces.append(piece)
        q_at, k_at = q_at + q_len, k_at + k_len
    return torch.cat(pieces)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
def test_forward_is_the_definition(heads: tuple[int, int, int], causal: bool) -> None:
    spans = [(0, 9), (12, 20), (30, 31)]
    call = pack(sequences((9, 20, 31), heads, "bf16"), 0.3, spans)
    call = dataclasses.replace(call, causal=causal)
    expected = naive_packed(call, call.q.double(), call.k.double(), call.v.double())
    close(reference.forward(call)["out"], expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
def test_backward_is_autograd_of_the_definition(heads: tuple[int, int, int], causal: bool) -> None:
    call = pack_backward(sequences((9, 1, 14), heads, "bf16"), 0.3)
    call = dataclasses.replace(call, causal=causal)
    leaves = [t.double().requires_grad_() for t in (call.q, call.k, call.v)]
    torch.autograd.backward(naive_packed(call, *leaves), call.dout.double())
    found = reference.backward(call)
    assert list(found) == ["dq", "dk", "dv"]
    for name, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        close(found[name], leaf.grad)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_paged_forward_is_the_packed_one(page_size: int, dtype: str) -> None:
    one = sequences((9, 20, 31), (4, 2, 16), dtype)
    spans = [(0, 9), (12, 20), (30, 31)]
    packed = reference.forward(pack(one, 0.3, spans))["out"]
    for shuffled in (False, True):
        call = page(one, spans, 0.3, page_size=page_size, shuffled=shuffled)
        assert digest(reference.forward(call)["out"]) == digest(packed)


def test_last_query_sees_every_key_and_the_first_of_equals_only_its_own() -> None:
    (one,) = sequences((6,), (1, 1, 4), "bf16")
    v = one.whole("v").double()
    out = reference.forward(pack([one], 0.0))["out"]
    for i in range(6):
        close(out[i, 0], v[: i + 1, 0].mean(0))
    chunk = reference.forward(pack([one], 0.0, [(4, 6)]))["out"]
    close(chunk[0, 0], v[:5, 0].mean(0))
    close(chunk[1, 0], v[:6, 0].mean(0))


def with_more_queries_than_keys(q_len: int, k_len: int) -> PackedPrefill:
    (one,) = sequences((max(q_len, k_len),), (4, 2, 16), "bf16")
    return PackedPrefill(
        q=one.rows("q", 0, q_len),
        k=one.rows("k", 0, k_len),
        v=one.rows("v", 0, k_len),
        cu_seqlens_q=cumulative([q_len], torch.device("cpu")),
        cu_seqlens_k=cumulative([k_len], torch.device("cpu")),
        q_lens=(q_len,),
        k_lens=(k_len,),
        softmax_scale=0.3,
    )


def test_rows_that_see_no_key_are_zero() -> None:
    call = with_more_queries_than_keys(8, 3)
    out = reference.forward(call)["out"]
    assert int(out[:5].count_nonzero()) == 0
    close(out, naive_packed(call, call.q.double(), call.k.double(), call.v.double()))


def test_gradients_of_rows_that_see_no_key_are_zero() -> None:
    call = with_more_queries_than_keys(8, 3)
    dout = torch.ones_like(call.q)
    backward = PackedBackward(**vars(call), dout=dout)
    found = reference.backward(backward)
    leaves = [t.double().requires_grad_() for t in (call.q, call.k, call.v)]
    torch.autograd.backward(naive_packed(call, *leaves), dout.double())
    for name, leaf in zip(found, leaves, strict=True):
        assert leaf.grad is not None
        close(found[name], leaf.grad)
    assert int(found["dq"][:5].count_nonzero()) == 0


@pytest.mark.parametrize("scores", [1, 40, 333])
def test_blocks_change_nothing(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = pack_backward(sequences((33, 17), (4, 2, 16), "bf16"), 0.3)
    chunk = pack(sequences((33, 17), (4, 2, 16), "bf16"), 0.3, [(20, 33), (3, 17)])
    whole = reference.forward(call), reference.backward(call), reference.forward(chunk)
    monkeypatch.setattr(reference, "_SCORES", scores)
    blocks = reference.forward(call), reference.backward(call), reference.forward(chunk)
    for a, b in zip(whole, blocks, strict=True):
        for name in a:
            close(a[name], b[name])


def test_padding_rows_of_the_reference_are_zero() -> None:
    one = sequences((9,), (4, 2, 16), "bf16")
    padded = reference.forward(pack(one, 0.3, padding=4))["out"]
    assert int(padded[9:].count_nonzero()) == 0
    close(padded[:9], reference.forward(pack(one, 0.3))["out"])


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    """Change one KV head: exactly its own query heads change."""
    (one,) = sequences((12,), (6, 3, 8), "bf16")
    call = pack([one], 0.3)
    v = call.v.clone()
    v[:, 1] += 1
    for compute in (reference.forward, eager.compute):
        before = compute(call)["out"]
        after = compute(dataclasses.replace(call, v=v))["out"]
        changed = [h for h in range(6) if digest(before[:, h]) != digest(after[:, h])]
        assert changed == [2, 3]


# --- plain torch ----------------------------------------------------------------------------------


def assert_rounded(found: torch.Tensor, ref: torch.Tensor, dtype: str, factor: float) -> None:
    """Within `factor` roundings of the size of the values."""
    assert found.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    error = (found.double() - ref).norm() / ref.norm()
    assert float(error) < factor * UNIT[dtype]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 32), (3, 3, 16)])
def test_plain_torch_is_the_reference_but_for_rounding(
    heads: tuple[int, int, int], dtype: str
) -> None:
    one = sequences((70, 33, 70), heads, dtype)
    scale = heads[2] ** -0.5
    spans = [(0, 70), (20, 33), (69, 70)]
    packed, paged = pack(one, scale, spans), page(one, spans, scale, page_size=16, shuffled=True)
    decode = page(one, [(n - 1, n) for n in (70, 33, 70)], scale, page_size=16, decode=True)
    call: PackedPrefill | PagedPrefill
    for call in (packed, paged, decode):
        assert_rounded(eager.compute(call)["out"], reference.forward(call)["out"], dtype, 3)
    backward = pack_backward(one, scale)
    found, expected = eager.compute(backward), reference.backward(backward)
    assert list(found) == list(expected)
    for name, gradient in found.items():
        assert_rounded(gradient, expected[name], dtype, 6)


def test_plain_torch_pages_change_no_bit() -> None:
    one = sequences((70, 33), (4, 2, 64), "bf16")
    spans = [(0, 70), (20, 33)]
    packed = eager.compute(pack(one, 0.125, spans))["out"]
    paged = eager.compute(page(one, spans, 0.125, page_size=16, shuffled=True, junk=5))["out"]
    assert digest(packed) == digest(paged)


def test_plain_torch_backward_can_be_run_again() -> None:
    run = eager.bind_backward(pack_backward(sequences((20,), (4, 2, 16), "bf16"), 0.25))
    first, second = run(), run()
    assert {n: digest(t) for n, t in first.items()} == {n: digest(t) for n, t in second.items()}


def test_hidden_keys_are_those_after_the_query_counted_from_the_end() -> None:
    mask = eager.hidden(2, 5, torch.device("cpu"))
    assert mask.int().tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
