"""The attention kernel on a GPU: right against fp64, and the same bits however it is asked.

Every comparison of bits is exact. Outputs are filled with NaN first, so that a row that was not
written shows; unused page slots and rows past the end hold NaN, so that a row that was read shows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_calls import (
    DEVICE,
    DTYPES,
    NAN,
    SHAPES,
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

from rlbench.kernels import jit
from rlbench.kernels.attention import Variant, attention, generic, operator

skip_without_gpu()


def call_into(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(
        q,
        k,
        v,
        cu_seqlens_q=offsets([q.shape[0]]),
        cu_seqlens_k=offsets([k.shape[0]]),
        max_seqlen_q=q.shape[0],
        out=out,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [None, 16])
def test_right(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    causal: bool,
    page_size: int | None,
    generator: torch.Generator,
) -> None:
    lengths = [(1, 1), (1, 517), (77, 77), (129, 300), (640, 640), (31, 2000), (13, 80), (80, 81)]
    sequences = [make(lq, lk, shape, dtype, generator) for lq, lk in lengths]
    if page_size is None:
        results = run(sequences, causal=causal)
    else:
        results = run_paged(sequences, page_size, generator, causal=causal)
    for sequence, result in zip(sequences, results, strict=True):
        assert_close(result, reference(sequence, causal=causal))


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_softmax_scale(scale: float, generator: torch.Generator) -> None:
    sequence = make(100, 300, (4, 2, 128), torch.float16, generator)
    (result,) = run([sequence], softmax_scale=scale)
    assert_close(result, reference(sequence, causal=True, scale=scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
def test_alone_is_in_any_batch(
    shape: tuple[int, int, int], dtype: torch.dtype, causal: bool, generator: torch.Generator
) -> None:
    target = make(333, 433, shape, dtype, generator)
    others = [make(n, n, shape, dtype, generator) for n in (1, 700, 64, 5)]
    (alone,) = run([target], causal=causal)
    for place in range(len(others) + 1):
        batch = [*others[:place], target, *others[place:]]
        result = run(batch, causal=causal)[place]
        assert same_bits(result.out, alone.out)
        assert same_bits(result.lse, alone.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 80, 100, 128, 257])
def test_chunked_is_whole(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    page_size: int | None,
    chunk: int,
    generator: torch.Generator,
) -> None:
    sequence = make(300, 411, shape, dtype, generator)
    (whole,) = run([sequence])
    for begin in range(0, 300, chunk):
        end = min(begin + chunk, 300)
        part = sequence.rows(begin, end)
        if page_size is None:
            (result,) = run([part])
        else:
            (result,) = run_paged([part], page_size, generator)
        assert same_bits(result.out, whole.out[begin:end])
        assert same_bits(result.lse, whole.lse[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_prefills_row(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    sequence = make(1100, 1100, shape, dtype, generator)
    (whole,) = run([sequence])
    positions = [0, 1, 15, 16, 63, 79, 80, 81, 127, 128, 255, 639, 640, 1000, 1099]
    steps = [sequence.rows(i, i + 1) for i in positions]
    for results in (
        [run([step])[0] for step in steps],
        run(steps),
        run_paged(steps, 16, generator),
        run_paged(steps[::-1], 16, generator)[::-1],
    ):
        for i, result in zip(positions, results, strict=True):
            assert same_bits(result.out, whole.out[i : i + 1])
            assert same_bits(result.lse, whole.lse[i : i + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 80, 256, 1024])
def test_paged_is_packed(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int, generator: torch.Generator
) -> None:
    lengths = [(1, 700), (200, 333), (65, 65), (1, 1)]
    sequences = [make(lq, lk, shape, dtype, generator) for lq, lk in lengths]
    packed = run(sequences)
    for _ in range(2):  # in two orders of the pages
        for result, want in zip(run_paged(sequences, page_size, generator), packed, strict=True):
            assert same_bits(result.out, want.out)
            assert same_bits(result.lse, want.lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 2, 64), (8, 2, 128), (8, 2, 256)])
def test_a_key_that_is_not_seen_is_an_exact_nothing(
    shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Huge values that a row does not see, next to tiny ones that it does, move no bit of it."""
    sequence = make(400, 400, shape, dtype, generator)
    # Sums so small that a term lined up with a huge exponent would swallow their last bits.
    tiny = sequence._replace(v=(sequence.v.float() * 2.0**-12).to(dtype))
    for end in (1, 17, 100, 129, 250):
        (want,) = run([tiny.rows(0, end)])
        k, v = tiny.k.clone(), tiny.v.clone()
        k[end:] = NAN  # a score is replaced, whatever it was
        v[end:] = torch.finfo(dtype).max  # but 0 * v has to be 0
        huge = call_into(torch.empty_like(tiny.q), tiny.q, k, v)
        assert same_bits(huge[:end], want.out)
        v[end:] = -torch.finfo(dtype).max
        huge = call_into(torch.empty_like(tiny.q), tiny.q, k, v)
        assert same_bits(huge[:end], want.out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [(10, 0), (100, 3), (200, 150)])
def test_rows_that_see_no_key(
    shape: tuple[int, int, int], lengths: tuple[int, int], generator: torch.Generator
) -> None:
    lq, lk = lengths
    sequence = make(lq, lk, shape, torch.bfloat16, generator)
    full = make(40, 40, shape, torch.bfloat16, generator)
    for results in (run([sequence, full]), run_paged([sequence, full], 16, generator)):
        result = results[0]
        blind = lq - lk
        assert same_bits(result.out[:blind], torch.zeros_like(result.out[:blind]))
        assert (result.lse[:blind] == -math.inf).all()
        assert_close(result, reference(sequence, causal=True))


def test_rows_of_no_sequence_are_not_written(generator: torch.Generator) -> None:
    q = normal((20, 4, 128), torch.bfloat16, generator)
    k = normal((20, 4, 128), torch.bfloat16, generator)
    out = torch.full_like(q, NAN)
    lengths = torch.tensor([5, 15], dtype=torch.int32, device=DEVICE)
    attention(q, k, k, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=1000, out=out)
    assert not out[5:15].isnan().any()
    assert out[:5].isnan().all()
    assert out[15:].isnan().all()


def test_strided_inputs(generator: torch.Generator) -> None:
    fused = normal((300, 12, 128), torch.bfloat16, generator)
    q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:]
    sequence = Sequence(q.contiguous(), k.contiguous(), v.contiguous())
    (want,) = run([sequence])
    wide = torch.full((300, 9, 128), NAN, dtype=q.dtype, device=DEVICE)
    got = call_into(wide[:, :8], q, k, v)
    assert same_bits(got, want.out)
    assert wide[:, 8].isnan().all()


def test_nothing_to_do(generator: torch.Generator) -> None:
    empty = make(0, 0, (4, 2, 64), torch.bfloat16, generator)
    (result,) = run([empty])
    assert result.out.shape == (0, 4, 64)
    (first, second, third) = run([empty, make(3, 3, (4, 2, 64), torch.bfloat16, generator), empty])
    assert [r.out.shape[0] for r in (first, second, third)] == [0, 3, 0]


def test_half_tiles_have_the_same_bits(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs with little shared memory take 32 rows at head dim 256: the height of a tile is free."""
    sequences = [make(n, n + 50, (8, 2, 256), torch.bfloat16, generator) for n in (1, 333)]
    want = [*run(sequences), *run_paged(sequences, 16, generator)]
    monkeypatch.setattr(operator, "_plans", {})
    monkeypatch.setattr(generic, "Variant", lambda d, e, p, tile_rows=32: Variant(d, e, p, 32))
    got = [*run(sequences), *run_paged(sequences, 16, generator)]
    for left, right in zip(got, want, strict=True):
        assert same_bits(left.out, right.out)
        assert same_bits(left.lse, right.lse)


def test_repeats_give_the_same_bits(generator: torch.Generator) -> None:
    sequences = [make(n, n, (16, 2, 256), torch.bfloat16, generator) for n in (1000, 17, 2048)]
    want = run(sequences)
    for _ in range(5):
        for left, right in zip(run(sequences), want, strict=True):
            assert same_bits(left.out, right.out)


def test_on_another_stream(generator: torch.Generator) -> None:
    sequence = make(200, 200, (8, 2, 128), torch.bfloat16, generator)
    (want,) = run([sequence])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call,unused-ignore]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        (got,) = run([sequence])
    torch.cuda.current_stream().wait_stream(stream)
    assert same_bits(got.out, want.out)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_in_a_cuda_graph(dim: int, generator: torch.Generator) -> None:
    """Replayed on other data and other lengths than it was captured with."""
    batch, pages, page = 4, 64, 16
    q = normal((batch, 8, dim), torch.bfloat16, generator)
    pool = normal((pages, page, 2, dim), torch.bfloat16, generator)
    table = torch.randperm(pages, device=DEVICE, generator=generator).to(torch.int32)
    lengths = torch.tensor([1, 5, 17, 100], dtype=torch.int32, device=DEVICE)
    arguments: dict[str, Any] = {
        "cu_seqlens_q": offsets([1] * batch),
        "max_seqlen_q": 1,
        "block_table": table.view(batch, -1),
        "seqused_k": lengths,
    }
    attention(q, pool, pool, **arguments)  # compiles
    out = torch.full_like(q, NAN)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention(q, pool, pool, out=out, **arguments)
    assert out.isnan().all()
    for new in ([1, 5, 17, 100], [256, 255, 16, 1]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        q.copy_(normal(tuple(q.shape), torch.bfloat16, generator))
        graph.replay()
        assert same_bits(out, attention(q, pool, pool, **arguments))


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_torch_compile(dynamic: bool, generator: torch.Generator) -> None:
    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(
            q + q,
            k,
            v,
            cu_seqlens_q=lengths,
            cu_seqlens_k=lengths,
            max_seqlen_q=longest,
            return_lse=True,
        )
        return out * 2, lse

    # The eager backend with functionalization: what is ours is the operator, not the code made.
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (100, 50):
        q, k, v = make(n, n, (8, 2, 128), torch.bfloat16, generator)
        got, want = (f(q, k, v, offsets([n]), n) for f in (compiled, layer))
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


def test_operator_is_registered_soundly(generator: torch.Generator) -> None:
    q, k, v = make(10, 10, (4, 2, 64), torch.bfloat16, generator)
    lengths = offsets([10])
    out = torch.zeros_like(q)
    lse = torch.zeros(q.shape[:2], device=DEVICE)
    torch.library.opcheck(
        torch.ops.rlbench.attention_forward.default,
        (q, k, v, out, lse, lengths, lengths, None, None, 10, 1, True, 0.125),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_misaligned_tensor_is_refused(generator: torch.Generator) -> None:
    flat = normal((4 * 2 * 64 + 1,), torch.bfloat16, generator)
    q = flat[1:].view(4, 2, 64)
    with pytest.raises(ValueError, match="16-byte boundaries"):
        call_into(torch.empty_like(q), q, q, q)


def test_exponentials_that_the_definition_needs() -> None:
    """ex2 of 0 and -0 is 1 and of -inf is 0, lg2 of 1 is 0: what the head of the source assumes."""
    from cuda.core import (
        LEGACY_DEFAULT_STREAM,
        LaunchConfig,
        ObjectCode,
        Program,
        ProgramOptions,
        launch,
    )

    source = """
    extern "C" __global__ void probe(const float* x, float* y) {
      float a, b;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(a) : "f"(x[threadIdx.x]));
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(x[threadIdx.x]));
      y[2 * threadIdx.x] = a;
      y[2 * threadIdx.x + 1] = b;
    }
    """
    major, minor = torch.cuda.get_device_capability()
    options = ProgramOptions(arch=f"sm_{major}{minor}")
    code = Program(source, code_type="c++", options=options).compile("cubin").code
    kernel = ObjectCode.from_cubin(bytes(code)).get_kernel("probe")
    x = torch.tensor([0.0, -0.0, -math.inf, 1.0], device=DEVICE)
    y = torch.full((4, 2), NAN, device=DEVICE)
    torch.cuda.synchronize()
    launch(LEGACY_DEFAULT_STREAM, LaunchConfig(grid=1, block=4), kernel, x.data_ptr(), y.data_ptr())
    torch.cuda.synchronize()
    assert y[:3, 0].tolist() == [1.0, 1.0, 0.0]
    assert same_bits(y[2:3, 0], torch.zeros(1, device=DEVICE))
    assert same_bits(y[3:4, 1], torch.zeros(1, device=DEVICE))


def test_kernel_on_this_device_does_not_spill() -> None:
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    variant = Variant(256, "Bf16", paged=True)
    usage = jit.compile_cubin(variant.source, arch=arch, defines=variant.defines).usage()
    assert usage.spill_store_bytes == usage.spill_load_bytes == usage.stack_bytes == 0
