"""The backward on a GPU: right against fp64, and the same bits run after run, whatever is beside it."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from attention_calls import (
    DEVICE,
    DTYPES,
    SHAPES,
    Sequence,
    generator_fixture,  # noqa: F401
    make,
    normal,
    offsets,
    reference,
    same_bits,
    skip_without_gpu,
)

from rlbench.kernels.attention import attention, backward, gradient, operator

skip_without_gpu()


class Gradients(NamedTuple):
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def run(
    sequences: list[Sequence], douts: list[torch.Tensor], *, causal: bool = True
) -> list[Gradients]:
    """The gradients of all sequences in one packed call."""
    lengths_q = [s.q.shape[0] for s in sequences]
    lengths_k = [s.k.shape[0] for s in sequences]
    q, k, v = (torch.cat(each).requires_grad_() for each in zip(*sequences, strict=True))
    out = attention(
        q,
        k,
        v,
        cu_seqlens_q=offsets(lengths_q),
        cu_seqlens_k=offsets(lengths_k),
        max_seqlen_q=max(lengths_q),
        causal=causal,
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.cat(douts))
    parts = torch.split(dq, lengths_q), torch.split(dk, lengths_k), torch.split(dv, lengths_k)
    return [Gradients(*each) for each in zip(*parts, strict=True)]


def in_fp64(sequence: Sequence, dout: torch.Tensor, *, causal: bool) -> Gradients:
    leaves = Sequence(*(t.double().requires_grad_() for t in sequence))
    out = reference(leaves, causal=causal).out
    return Gradients(*(g.nan_to_num(0.0) for g in torch.autograd.grad(out, leaves, dout.double())))


def dout_of(sequence: Sequence, generator: torch.Generator) -> torch.Tensor:
    return normal(tuple(sequence.q.shape), sequence.q.dtype, generator)


def equal(got: Gradients, want: Gradients) -> bool:
    return all(same_bits(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
def test_right(
    shape: tuple[int, int, int], dtype: torch.dtype, causal: bool, generator: torch.Generator
) -> None:
    lengths = [(1, 1), (1, 517), (77, 77), (129, 300), (640, 640), (31, 2000), (80, 81), (40, 9)]
    sequences = [make(lq, lk, shape, dtype, generator) for lq, lk in lengths]
    douts = [dout_of(sequence, generator) for sequence in sequences]
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    results = run(sequences, douts, causal=causal)
    for sequence, dout, result in zip(sequences, douts, results, strict=True):
        for got, want in zip(result, in_fp64(sequence, dout, causal=causal), strict=True):
            assert got.isfinite().all()
            # A sequence of one key has gradients of about nothing.
            assert (got.double() - want).norm() <= 1.2 * unit * want.norm() + unit * 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
def test_alone_is_in_any_batch(
    shape: tuple[int, int, int], dtype: torch.dtype, causal: bool, generator: torch.Generator
) -> None:
    target = make(333, 433, shape, dtype, generator)
    others = [make(n, n, shape, dtype, generator) for n in (1, 700, 64, 5)]
    dout, rest = dout_of(target, generator), [dout_of(other, generator) for other in others]
    (alone,) = run([target], [dout], causal=causal)
    for place in range(len(others) + 1):
        batch = [*others[:place], target, *others[place:]]
        results = run(batch, [*rest[:place], dout, *rest[place:]], causal=causal)
        assert equal(results[place], alone)


@pytest.mark.parametrize("shape", SHAPES)
def test_again_is_the_same(shape: tuple[int, int, int], generator: torch.Generator) -> None:
    sequences = [make(n, n, shape, torch.bfloat16, generator) for n in (1500, 40, 900)]
    douts = [dout_of(sequence, generator) for sequence in sequences]
    first = run(sequences, douts)
    for _ in range(10):
        assert all(map(equal, run(sequences, douts), first))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_of_a_long_sequence(
    head_dim: int, causal: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread blocks that wait for each other: right, repeatable, and the generic kernels' bits."""
    shape = 16, 2, head_dim
    assert 2 * backward.CHUNK_ROWS < 5000 * 8
    lengths = [(5000, 5000), (100, 100), (3000, 6000), (4100, 80)]
    sequences = [make(lq, lk, shape, torch.bfloat16, generator) for lq, lk in lengths]
    douts = [dout_of(sequence, generator) for sequence in sequences]
    want = run(sequences, douts, causal=causal)
    for _ in range(3):
        assert all(map(equal, run(sequences, douts, causal=causal), want))
    for sequence, dout, its in zip(sequences, douts, want, strict=True):
        assert equal(run([sequence], [dout], causal=causal)[0], its)
    for got, right in zip(want[0], in_fp64(sequences[0], douts[0], causal=causal), strict=True):
        assert (got.double() - right).norm() <= 1.2 * 2.0**-8 * right.norm()
    monkeypatch.setenv("RLBENCH_ATTENTION_HOPPER", "0")
    monkeypatch.setattr(gradient, "_plans", {})
    monkeypatch.setattr(operator, "_plans", {})
    assert all(map(equal, run(sequences, douts, causal=causal), want))


def test_a_row_of_no_sequence_has_no_gradient(generator: torch.Generator) -> None:
    sequence = make(50, 60, (4, 2, 128), torch.bfloat16, generator)
    q, k, v = (t.clone().requires_grad_() for t in sequence)
    out = attention(
        q, k, v, cu_seqlens_q=offsets([30]), cu_seqlens_k=offsets([40]), max_seqlen_q=30
    )
    dout = dout_of(sequence, generator)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    assert not dq[30:].any()
    assert not dk[40:].any()
    assert not dv[40:].any()
    assert dq[:30].any()


def test_strided_tensors_and_an_expanded_gradient(generator: torch.Generator) -> None:
    fused = normal((100, 8, 128), torch.bfloat16, generator).requires_grad_()
    cu = offsets([100])
    q, k, v = torch.split(fused, [4, 2, 2], 1)
    out = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=100)
    torch.autograd.backward(out.sum())
    parts = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    out = attention(*parts, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=100)
    torch.autograd.backward(out, torch.ones_like(out))
    assert fused.grad is not None
    for got, want in zip(torch.split(fused.grad, [4, 2, 2], 1), parts, strict=True):
        assert want.grad is not None
        assert same_bits(got, want.grad)


def test_compiled_is_eager(generator: torch.Generator) -> None:
    sequence = make(200, 200, (8, 2, 64), torch.bfloat16, generator)
    dout = dout_of(sequence, generator)
    lengths = offsets([200])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=200)

    both = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in sequence]
        both.append(Gradients(*torch.autograd.grad(function(*leaves), leaves, dout)))
    assert equal(*both)


def test_another_process_has_the_same() -> None:
    program = """
import hashlib, torch
from rlbench.kernels.attention import attention, backward, gradient, operator
g = torch.Generator(device="cuda").manual_seed(7)
q, k, v = (torch.randn(700, h, 128, device="cuda", generator=g).bfloat16().requires_grad_() for h in (8, 2, 2))
cu = torch.tensor([0, 700], dtype=torch.int32, device="cuda")
out = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=700)
dout = torch.randn(out.shape, device="cuda", generator=g).bfloat16()
grads = torch.autograd.grad(out, (q, k, v), dout)
print([hashlib.sha256(t.cpu().view(torch.int16).numpy().tobytes()).hexdigest() for t in grads])
"""
    said = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1


def test_a_large_tensor_is_reached(generator: torch.Generator) -> None:
    """Rows beyond 2^31 elements."""
    rows = 2**31 // (16 * 256) + 40
    if torch.cuda.mem_get_info()[0] < 8 * rows * 16 * 256 * 2:
        pytest.skip("needs more memory")
    target = make(40, 40, (16, 16, 256), torch.bfloat16, generator)
    dout = dout_of(target, generator)
    (want,) = run([target], [dout])
    q, k, v, whole = (
        torch.zeros((rows, 16, 256), dtype=torch.bfloat16, device=DEVICE) for _ in "qkvo"
    )
    for tensor, part in zip((q, k, v, whole), (*target, dout), strict=True):
        tensor[-40:] = part
    leaves = [t.requires_grad_() for t in (q, k, v)]
    # Nobody has the rows before.
    cu = torch.tensor([rows - 40, rows], device=DEVICE, dtype=torch.int32)
    out = attention(*leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=40)
    got = torch.autograd.grad(out, leaves, whole)
    assert equal(Gradients(*(t[-40:] for t in got)), want)
