"""What the attention kernel's tests share: sequences, calls into poisoned memory, fp64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from rlbench.kernels.attention import attention

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = torch.device("cuda")
NAN = float("nan")

# Query heads, KV heads, head dim: multi-query, grouped, an odd group, one head for each.
SHAPES = [(8, 2, 64), (8, 1, 128), (5, 1, 128), (2, 2, 128), (16, 2, 256), (3, 3, 256)]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, name="inference")
def inference_fixture() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(name="generator")
def generator_fixture() -> torch.Generator:
    seed = torch.seed() % 2**31
    print(f"seed {seed}")  # noqa: T201 - fresh inputs every time; a failure shows which
    return torch.Generator(device=DEVICE).manual_seed(seed)


def skip_without_gpu() -> None:
    """Skip the module that calls this where its kernels cannot run."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device", allow_module_level=True)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0 or newer", allow_module_level=True)


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


class Result(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


class Sequence(NamedTuple):
    """One sequence's tensors: q `[Lq, heads, D]`, k and v `[Lk, kv_heads, D]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def rows(self, begin: int, end: int) -> Sequence:
        """The queries begin to end, against the keys up to the last of them (causal)."""
        keys = self.k.shape[0] - self.q.shape[0] + end
        return Sequence(self.q[begin:end], self.k[:keys], self.v[:keys])


def make(
    lq: int, lk: int, shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> Sequence:
    heads, kv_heads, dim = shape
    return Sequence(
        normal((lq, heads, dim), dtype, generator),
        normal((lk, kv_heads, dim), dtype, generator),
        normal((lk, kv_heads, dim), dtype, generator),
    )


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Result:
    """Runs into an output full of NaN, and checks that nothing of it is left."""
    poisoned = torch.full_like(q, NAN)
    out, lse = attention(q, k, v, out=poisoned, return_lse=True, **arguments)
    assert out is poisoned
    assert not out.isnan().any()
    assert not lse.isnan().any()
    return Result(out, lse)


def run(sequences: list[Sequence], **arguments: Any) -> list[Result]:
    """All sequences in one packed call; the keys are followed by rows of NaN."""
    lengths_q = [s.q.shape[0] for s in sequences]
    lengths_k = [s.k.shape[0] for s in sequences]
    guard = sequences[0].k.new_full((130, *sequences[0].k.shape[1:]), NAN)
    whole = call(
        torch.cat([s.q for s in sequences]),
        torch.cat([*(s.k for s in sequences), guard]),
        torch.cat([*(s.v for s in sequences), guard]),
        cu_seqlens_q=offsets(lengths_q),
        cu_seqlens_k=offsets(lengths_k),
        max_seqlen_q=max(lengths_q),
        **arguments,
    )
    return [Result(*pair) for pair in zip(*(torch.split(t, lengths_q) for t in whole), strict=True)]


def run_paged(
    sequences: list[Sequence], page_size: int, generator: torch.Generator, **arguments: Any
) -> list[Result]:
    """The same with keys in pages: in random order, NaN wherever there is no key."""
    lengths_q = [s.q.shape[0] for s in sequences]
    lengths_k = [s.k.shape[0] for s in sequences]
    counts = [-(-length // page_size) for length in lengths_k]
    pages = sum(counts) + 3
    order = torch.randperm(pages, device=DEVICE, generator=generator).to(torch.int32)
    # Interleaved, as some engines keep them: the strides of a page are not those of its rows.
    pool = torch.full((pages, 2, page_size, *sequences[0].k.shape[1:]), NAN, device=DEVICE).to(
        sequences[0].k.dtype
    )
    k_pool, v_pool = pool.unbind(1)
    # Entries that no key needs name a page that does not exist.
    table = torch.full((len(sequences), max(counts) + 2), 2**30, dtype=torch.int32, device=DEVICE)
    used = 0
    for b, sequence in enumerate(sequences):
        mine = order[used : used + counts[b]]
        used += counts[b]
        table[b, : counts[b]] = mine
        for p, page in enumerate(mine.tolist()):
            keys = slice(p * page_size, min((p + 1) * page_size, lengths_k[b]))
            k_pool[page, : keys.stop - keys.start] = sequence.k[keys]
            v_pool[page, : keys.stop - keys.start] = sequence.v[keys]
    whole = call(
        torch.cat([s.q for s in sequences]),
        k_pool,
        v_pool,
        cu_seqlens_q=offsets(lengths_q),
        seqused_k=torch.tensor(lengths_k, dtype=torch.int32, device=DEVICE),
        block_table=table,
        max_seqlen_q=max(lengths_q),
        **arguments,
    )
    return [Result(*pair) for pair in zip(*(torch.split(t, lengths_q) for t in whole), strict=True)]


def reference(sequence: Sequence, *, causal: bool, scale: float | None = None) -> Result:
    """Attention in fp64 on the same 16-bit inputs."""
    q, k, v = (t.double() for t in sequence)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[2] ** -0.5)
    if causal:
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE)
        scores = scores.masked_fill(~seen.tril(k.shape[0] - q.shape[0]), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return Result(torch.einsum("hqk,khd->qhd", weights, v), lse.T)


def assert_close(got: Result, want: Result) -> None:
    dtype = got.out.dtype
    # One rounding of the weights and one of the output, and fp32 sums in between.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    error = (got.out.double() - want.out).abs()
    size = want.out.abs().max().clamp(min=1.0)
    assert error.max() <= 4 * unit * size
    if error.numel() > 1000:
        assert error.pow(2).mean().sqrt() <= unit * want.out.pow(2).mean().sqrt().clamp(min=0.05)
    blind = want.lse.isinf()
    assert torch.equal(got.lse.isinf(), blind)
    torch.testing.assert_close(got.lse[~blind].double(), want.lse[~blind], rtol=1e-6, atol=2e-5)
