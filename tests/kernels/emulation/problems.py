"""What emulated kernels compute: sequences in poisoned memory, and the same in fp64."""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rlbench.kernels.attention.request import ELEMENTS, Request, split_keys

NAN = float("nan")
NO_PAGE = 10**6 + 3  # no power of two, of which 32 bits may leave page 0


class Case(NamedTuple):
    """Sequences of so many queries and keys, and how they are attended to."""

    head_dim: int
    dtype: torch.dtype
    page_size: int | None
    heads: int
    kv_heads: int
    lengths: tuple[tuple[int, int], ...]
    causal: bool = True

    def __str__(self) -> str:
        layout = f"pages-of-{self.page_size}" if self.page_size else "packed"
        mask = "causal" if self.causal else "full"
        kind = f"d{self.head_dim}-{ELEMENTS[self.dtype].lower()}-{layout}"
        return f"{kind}-{self.heads}-on-{self.kv_heads}-{mask}"


class Result(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class CpuRequest(Request):
    """A request whose tensors are on no device that there is a kernel for."""

    @property
    def device(self) -> int:
        return 0


@dataclass(frozen=True)
class Problem:
    """A case with its tensors."""

    case: Case
    request: CpuRequest
    """Its `out` is only a template."""
    cu_seqlens_q: torch.Tensor
    lengths_k: torch.Tensor
    packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """q, k and v without gaps, for the reference."""

    def poisoned(self, begin: int, end: int | None = None) -> Problem:
        """The same with infinity and NaN for these packed keys and values."""
        k, v = self.request.k.clone(), self.request.v.clone()
        k[begin:end], v[begin:end] = math.inf, NAN
        return replace(self, request=replace(self.request, k=k, v=v))

    def promised(self, splits: int) -> Problem:
        """The same, told that no sequence has keys in more splits."""
        return replace(self, request=replace(self.request, splits=splits))


@functools.cache
def problem_of(case: Case) -> Problem:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()))

    def normal(count: int, heads: int) -> torch.Tensor:
        shape = (count, heads, case.head_dim)
        return torch.randn(shape, generator=generator).to(case.dtype)

    queries, keys = ([pair[i] for pair in case.lengths] for i in (0, 1))
    # Large queries, so that references move.
    q = normal(sum(queries), case.heads) * 3
    k, v = normal(sum(keys), case.kv_heads), normal(sum(keys), case.kv_heads)
    table = None
    if case.page_size is None:
        stored_k, stored_v = gapped(k.shape, case.dtype, 8), gapped(v.shape, case.dtype, 16)
        stored_k.copy_(k)
        stored_v.copy_(v)
        lengths_k = offsets(keys)
    else:
        table, stored_k, stored_v = _pages(case, keys, k, v, generator)
        lengths_k = torch.tensor(keys, dtype=torch.int32)
    stored_q = gapped(q.shape, case.dtype, 8)
    stored_q.copy_(q)
    request = CpuRequest(
        q=stored_q,
        k=stored_k,
        v=stored_v,
        out=gapped(q.shape, case.dtype, 24),
        block_table=table,
        sequences=len(case.lengths),
        max_seqlen_q=max(queries),
        splits=max(1, -(-max(keys) // split_keys(case.head_dim))),
        causal=case.causal,
        softmax_scale=case.head_dim**-0.5,
    )
    return Problem(case, request, offsets(queries), lengths_k, (q, k, v))


def gapped(shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> torch.Tensor:
    """NaNs, of which `gap` lie after each row of the last dimension."""
    return torch.full((*shape[:-1], shape[-1] + gap), NAN, dtype=dtype)[..., : shape[-1]]


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _pages(
    case: Case, keys: list[int], k: torch.Tensor, v: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys in pages in random order: NaN where there is no key, no page where no key needs one."""
    size = case.page_size
    assert size is not None
    counts = [-(-length // size) for length in keys]
    order = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32)
    shape = (len(order), size, case.kv_heads, case.head_dim)
    k_pool, v_pool = gapped(shape, case.dtype, 8), gapped(shape, case.dtype, 16)
    table = torch.full((len(keys), max(counts) + 1), NO_PAGE, dtype=torch.int32)
    used = begin = 0
    for b, length in enumerate(keys):
        table[b, : counts[b]] = order[used : used + counts[b]]
        for p, page in enumerate(table[b, : counts[b]].tolist()):
            rows = slice(begin + p * size, begin + min((p + 1) * size, length))
            k_pool[page, : rows.stop - rows.start] = k[rows]
            v_pool[page, : rows.stop - rows.start] = v[rows]
        used += counts[b]
        begin += length
    return table, k_pool, v_pool


def reference(problem: Problem) -> Result:
    """Attention in fp64 on the same 16-bit inputs."""
    case = problem.case
    queries, keys = ([pair[i] for pair in case.lengths] for i in (0, 1))
    q, k, v = (t.double() for t in problem.packed)
    group = case.heads // case.kv_heads
    outs, lses = [], []
    parts = (torch.split(q, queries), torch.split(k, keys), torch.split(v, keys))
    for one_q, one_k, one_v in zip(*parts, strict=True):
        wide_k, wide_v = (t.repeat_interleave(group, 1) for t in (one_k, one_v))
        scores = torch.einsum("qhd,khd->hqk", one_q, wide_k) * problem.request.softmax_scale
        if case.causal:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool)
            seen = seen.tril(one_k.shape[0] - one_q.shape[0])
            scores = scores.masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
        outs.append(torch.einsum("hqk,khd->qhd", weights, wide_v))
        lses.append(lse.T)
    return Result(torch.cat(outs), torch.cat(lses))


def assert_close(got: Result, want: Result) -> None:
    # One rounding of the weights and one of the output, and fp32 sums in between.
    unit = 2.0**-8 if got.out.dtype == torch.bfloat16 else 2.0**-11
    error = (got.out.double() - want.out).abs()
    assert error.max() <= 4 * unit * want.out.abs().max().clamp(min=1.0)
    blind = want.lse.isinf()
    assert torch.equal(got.lse.isinf(), blind)
    torch.testing.assert_close(got.lse[~blind].double(), want.lse[~blind], rtol=1e-6, atol=2e-5)


def assert_same_bits(got: Result, want: Result) -> None:
    """Rows without keys and NaNs, too."""
    differing = (bits(got.out) != bits(want.out)).any(-1) | (bits(got.lse) != bits(want.lse))
    assert not differing.any(), f"rows and heads that differ: {differing.nonzero().tolist()[:20]}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
