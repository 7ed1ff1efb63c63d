"""Attention over more keys than a split, and the kernels for Hopper: the generic kernel's bits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attention_calls import (
    DEVICE,
    DTYPES,
    NAN,
    SHAPES,
    Result,
    Sequence,
    assert_close,
    generator_fixture,  # noqa: F401
    inference_fixture,  # noqa: F401
    make,
    normal,
    offsets,
    reference,
    run,
    run_paged,
    same_bits,
    skip_without_gpu,
)

from rlbench.kernels.attention import (
    attention,
    decode,
    generic,
    launch,
    operator,
    prefill,
    stream,
    tensor_map,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from rlbench.kernels.attention.request import Request

skip_without_gpu()

hopper = pytest.mark.skipif(
    torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0 or newer"
)
# Sides of a split at each head dim (2304, 2240), of its blocks, and several splits.
EDGES = [0, 1, 2000, 2239, 2240, 2241, 2303, 2304, 2305, 4479, 4480, 4481, 4607, 4608, 4609, 5200]


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(launch.SWITCH, "1")
    operator._plans.clear()
    yield
    operator._plans.clear()


def steps_of(sequence: Sequence, positions: list[int]) -> list[Sequence]:
    return [sequence.rows(i, i + 1) for i in positions]


def all_ways(steps: list[Sequence], generator: torch.Generator) -> Iterator[list[Result]]:
    yield [run([step])[0] for step in steps]
    yield run(steps)
    yield run_paged(steps, 16, generator)
    yield run_paged(steps, 64, generator)
    yield run_paged(steps[::-1], 7, generator)[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_prefills_row_over_many_splits(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    sequence = make(5201, 5201, shape, dtype, generator)
    (whole,) = run([sequence])
    assert_close(whole, reference(sequence, causal=True))
    for results in all_ways(steps_of(sequence, EDGES), generator):
        for i, result in zip(EDGES, results, strict=True):
            assert same_bits(result.out, whole.out[i : i + 1]), i
            assert same_bits(result.lse, whole.lse[i : i + 1]), i


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [333, 1000, 2048, 4000])
@pytest.mark.parametrize("page_size", [None, 16])
def test_chunked_is_whole_over_many_splits(
    shape: tuple[int, int, int], chunk: int, page_size: int | None, generator: torch.Generator
) -> None:
    sequence = make(4500, 4500, shape, torch.bfloat16, generator)
    (whole,) = run([sequence])
    for begin in range(0, 4500, chunk):
        end = min(begin + chunk, 4500)
        part = [sequence.rows(begin, end)]
        (result,) = run_paged(part, page_size, generator) if page_size else run(part)
        assert same_bits(result.out, whole.out[begin:end])
        assert same_bits(result.lse, whole.lse[begin:end])


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (16, 1, 128), (20, 1, 64), (32, 8, 128), (12, 4, 256)])
def test_decode_kernels_have_the_generic_kernels_bits(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [1, 2, 16, 79, 80, 81, 128, 129, 700, 2239, 2240, 2241, 2304, 2305, 4701, 6800]
    steps = [make(1, n, shape, dtype, generator) for n in lengths]

    def results(serving: ModuleType) -> list[list[Result]]:
        operator._plans.clear()
        with monkeypatch.context() as only:
            for other in {decode, stream} - {serving}:
                only.setattr(other, "serves", lambda *_: False)
            return [*all_ways(steps, generator)]

    want = results(generic)
    got = want[1:]
    with monkeypatch.context() as forced:
        for tma in ("1", "0"):
            forced.setenv(tensor_map.SWITCH, tma)
            for whole in (True, False):
                forced.setattr(stream, "takes_whole", lambda _, whole=whole: whole)
                got += results(stream)
        forced.setenv(tensor_map.SWITCH, "1")
        for ranks in decode.ranks_for(shape[2]):
            forced.setattr(decode, "variant_for", functools.partial(with_ranks, ranks))
            got += results(decode)
    operator._plans.clear()
    for ways in got:
        for n, result, slow in zip(lengths, ways, want[0], strict=True):
            assert same_bits(result.out, slow.out), n
            assert same_bits(result.lse, slow.lse), n


def with_ranks(ranks: int, request: Request) -> decode.Variant | None:
    variant = decode.Variant(*request.build, ranks)
    possible = request.max_seqlen_q == 1 and decode.maps_of(request, variant)
    return variant if possible else None


@hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    # Groups of which Q comes by TMA, and others; the last one only to three consumers.
    [*SHAPES, (16, 1, 128), (20, 1, 64), (32, 8, 128), (4, 4, 256), (10, 2, 128), (6, 2, 64)],
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [None, 16, 7])
def test_prefill_kernel_has_the_generic_kernels_bits(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    causal: bool,
    page_size: int | None,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [(1, 1), (2, 2), (7, 300), (64, 64), (129, 500), (300, 2100), (1, 4500), (700, 4200)]
    sequences = [make(lq, lk, shape, dtype, generator) for lq, lk in lengths]

    def results() -> list[Result]:
        operator._plans.clear()
        if page_size:
            return run_paged(sequences, page_size, generator, causal=causal)
        return run(sequences, causal=causal)

    monkeypatch.setenv(tensor_map.SWITCH, "1")
    fast = results()
    monkeypatch.setenv(tensor_map.SWITCH, "0")
    without_tma = results()
    monkeypatch.setattr(prefill, "serves", lambda *_: False)
    for n, result, other, want in zip(lengths, fast, without_tma, results(), strict=True):
        assert same_bits(other.out, want.out), n
        assert same_bits(other.lse, want.lse), n
        assert same_bits(result.out, want.out), n
        assert same_bits(result.lse, want.lse), n
        assert_close(result, reference(sequences[lengths.index(n)], causal=causal))


@hopper
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tma", ["1", "0"])
def test_prefill_sees_nothing_of_the_next_sequence(
    shape: tuple[int, int, int],
    tma: str,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(tensor_map.SWITCH, tma)
    sequences = [make(lq, lk, shape, torch.bfloat16, generator) for lq, lk in ((90, 203), (0, 150))]
    want = run(sequences)[0]
    sequences[1].k.fill_(NAN)
    sequences[1].v.fill_(NAN)
    got = run(sequences)[0]
    assert same_bits(got.out, want.out)
    assert same_bits(got.lse, want.lse)


@hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_each_call_runs_the_kernel_meant_for_it(
    shape: tuple[int, int, int], generator: torch.Generator
) -> None:
    def kernels(sequences: list[Sequence]) -> str:
        run(sequences)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            run(sequences)
            torch.cuda.synchronize()
        return " ".join(event.name for event in seen.events())

    def step(keys: int) -> Sequence:
        return make(1, keys, shape, torch.bfloat16, generator)

    assert "attention_prefill" in kernels([make(300, 300, shape, torch.bfloat16, generator)])
    one, several, many = kernels([step(100)]), kernels([step(5000)]), kernels([step(100)] * 400)
    assert "attention_decode" in one
    assert "attention_combine" not in one
    assert "attention_decode" in several
    assert "attention_combine" in several
    assert "attention_stream" in many
    assert "attention_generic" not in one + several + many


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("decoding", [True, False])
def test_rows_with_more_keys_than_was_said_become_nan(
    dim: int, decoding: bool, generator: torch.Generator
) -> None:
    sequence = make(5000, 5000, (8, 2, dim), torch.bfloat16, generator)
    query = sequence.q[-1:] if decoding else sequence.q
    arguments: dict[str, Any] = {
        "cu_seqlens_q": offsets([query.shape[0]]),
        "cu_seqlens_k": offsets([5000]),
        "max_seqlen_q": query.shape[0],
        "return_lse": True,
    }
    for said in (1, 2240):
        out, lse = attention(query, sequence.k, sequence.v, max_seqlen_k=said, **arguments)
        assert out[-1].isnan().all()
        assert lse[-1].isnan().all()
    out, lse = attention(query, sequence.k, sequence.v, max_seqlen_k=5000, **arguments)
    assert not out.isnan().any()
    assert not lse.isnan().any()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_splits_in_a_cuda_graph(dim: int, generator: torch.Generator) -> None:
    """Replayed with other lengths: some with one split, some with several."""
    pages, page = 1024, 16
    q = normal((3, 16, dim), torch.bfloat16, generator)
    pool = normal((pages, page, 2, dim), torch.bfloat16, generator)
    table = torch.randperm(pages, device=DEVICE, generator=generator).to(torch.int32)
    lengths = torch.tensor([1, 300, 5000], dtype=torch.int32, device=DEVICE)
    arguments: dict[str, Any] = {
        "cu_seqlens_q": offsets([1, 1, 1]),
        "max_seqlen_q": 1,
        "block_table": table[: 3 * 341].view(3, -1),
        "seqused_k": lengths,
    }
    attention(q, pool, pool, **arguments)  # compiles
    out = torch.full_like(q, NAN)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, pool, pool, out=out, **arguments)
    for new in ([1, 300, 5000], [5456, 2305, 0], [2240, 2304, 4608]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        q.copy_(normal(tuple(q.shape), torch.bfloat16, generator))
        out.fill_(NAN)
        graph.replay()
        assert not out.isnan().any()
        for b, length in enumerate(new):  # each alone, as a packed call
            keys = pool[arguments["block_table"][b].long()].flatten(0, 1)[:length].contiguous()
            alone = attention(
                q[b : b + 1],
                keys,
                keys,
                cu_seqlens_q=offsets([1]),
                cu_seqlens_k=offsets([length]),
                max_seqlen_q=1,
            )
            assert same_bits(out[b : b + 1], alone)


def test_no_key_at_all(generator: torch.Generator) -> None:
    for dim in (64, 128, 256):
        steps = [make(1, n, (8, 2, dim), torch.bfloat16, generator) for n in (0, 3000, 0)]
        for results in (run(steps), run_paged(steps, 16, generator)):
            for empty in (results[0], results[2]):
                assert not empty.out.any()
                assert bool((empty.lse == -torch.inf).all())


def test_half_tiles_have_the_same_bits_over_many_splits(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = make(2600, 4500, (4, 1, 256), torch.bfloat16, generator)
    (whole,) = run([sequence])

    def half(head_dim: int, element: str, paged: bool, device: int) -> generic.Variant:
        return generic.Variant(head_dim, element, paged, tile_rows=32)

    with monkeypatch.context() as patch:
        patch.setattr(generic, "fitting_variant", half)
        operator._plans.clear()
        (result,) = run([sequence])
    operator._plans.clear()
    assert same_bits(result.out, whole.out)
    assert same_bits(result.lse, whole.lse)
