"""flex's masks, layouts and compilations, with dynamo but no generated code: CI has no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._functorch import config as autograd
from torch.nn.attention.flex_attention import BlockMask, create_mask

from rlbench.engines import _flex, flex
from rlbench.errors import Unavailable, Unsupported
from rlbench.measure.bits import digest
from rlbench.ops._op import Kernel
from rlbench.ops.attention import eager, reference
from rlbench.ops.attention.calls import PackedPrefill, PagedDecode, PagedPrefill
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, pack_backward, page

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
SCALE = 64**-0.5
LENGTHS = (70, 33, 200)
SPANS = [(0, 70), (20, 33), (199, 200)]
LAST = [(n - 1, n) for n in LENGTHS]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Everything that the engine sets or fills is as it was afterwards."""
    torch._dynamo.reset()
    defaults = {"recompile_limit": 8, "accumulated_recompile_limit": 256, "specialize_float": False}
    with dynamo.patch(defaults), autograd.patch(donated_buffer=True):
        yield


class Graphs:
    """A compiler's backend that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]
    ) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def inputs(self) -> list[Any]:
        """What stands for the inputs of the last graph."""
        nodes = self.graphs[-1].graph.find_nodes(op="placeholder")
        return [node.meta["example_value"] for node in nodes]


def kernel(backend: Any = "eager") -> Kernel:
    how: dict[str, Any] = _flex.compiled.keywords  # type: ignore[attr-defined]
    return _flex.kernel(partial(torch.compile, **{**how, "backend": backend}))


def sequences(
    lengths: tuple[int, ...] = LENGTHS, dtype: str = "bf16", kv_heads: int = 2
) -> list[Sequence]:
    shape: dict[str, Any] = {"q_heads": 4, "kv_heads": kv_heads, "head_dim": 64}
    return [Sequence(i, n, dtype=dtype, device="cpu", **shape) for i, n in enumerate(lengths)]


def spoilt(call: PagedPrefill) -> PagedPrefill:
    """The call, with NaN in every slot that no key uses."""
    for cache in (call.k_cache, call.v_cache):
        used = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for i, n in enumerate(call.k_lens):
            for j in range(n):
                used[int(call.block_table[i, j // call.page_size]), j % call.page_size] = True
        cache[~used] = float("nan")
    return call


def assert_rounded(found: torch.Tensor, ref: torch.Tensor, dtype: str, factor: float) -> None:
    assert found.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert found.shape == ref.shape
    error = (found.double() - ref).norm() / ref.norm()
    assert float(error) < factor * UNIT[dtype]


@pytest.mark.parametrize(("dtype", "kv_heads"), [("bf16", 2), ("fp16", 1)])
def test_forward_is_the_reference_but_for_rounding(kv_heads: int, dtype: str) -> None:
    one, entries = sequences(dtype=dtype, kv_heads=kv_heads), kernel()
    for call in (
        pack(one, SCALE, SPANS, padding=5),
        spoilt(page(one, LAST, SCALE, page_size=16, shuffled=True, decode=True)),
    ):
        out = entries.bind(call)()["out"]
        rows = sum(call.q_lens)
        assert_rounded(out[:rows], reference.forward(call)["out"][:rows], dtype, 3)
        assert out.shape == call.q.shape and bool(torch.isfinite(out).all())


def test_queries_that_see_no_key_and_padding_give_zeros() -> None:
    """More queries than keys: the first rows of a bottom-right aligned mask are empty."""
    call = pack(sequences((70, 33)), SCALE, padding=5)
    fewer = PackedPrefill(
        **{**vars(call), "k_lens": (60, 33), "k": call.k[10:], "v": call.v[10:]},
    )
    out = kernel().bind(fewer)()["out"]
    expected = reference.forward(fewer)["out"]
    assert int(expected[:10].count_nonzero()) == 0
    assert int(out[:10].count_nonzero()) == int(out[103:].count_nonzero()) == 0
    assert_rounded(out, expected, "bf16", 3)


def test_mask_that_is_not_causal_shows_each_sequence_its_own_keys() -> None:
    call = PackedPrefill(**{**vars(pack(sequences(), SCALE, SPANS)), "causal": False})
    assert_rounded(kernel().bind(call)()["out"], reference.forward(call)["out"], "bf16", 3)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    kernel_options: Any = None,
) -> torch.Tensor:
    """A differentiable flex_attention: the real one has no backward on the CPU."""
    mask = create_mask(block_mask.mask_mod, None, None, q.shape[2], k.shape[2], "cpu")
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )


def test_backward_is_the_reference_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flex, "flex_attention", dense)
    call = pack_backward(sequences(), SCALE)
    before = [digest(t) for t in (call.q, call.k, call.v, call.dout)]
    run = _flex.kernel(lambda attend: attend).bind(call)
    found, expected = run(), reference.backward(call)
    assert list(found) == ["dq", "dk", "dv"]
    for tensor, gradient in found.items():
        assert_rounded(gradient, expected[tensor], "bf16", 6)
        assert torch.equal(gradient, run()[tensor])
    assert [digest(t) for t in (call.q, call.k, call.v, call.dout)] == before
    assert not call.q.requires_grad
    assert not autograd.donated_buffer, "torch refuses a second backward with it"


def test_forward_leaves_autograd_out_and_short_chunks_take_the_main_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, Any]] = []

    def watch(*tensors: torch.Tensor, kernel_options: Any = None, **given: Any) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), kernel_options))
        return dense(*tensors, **given)

    monkeypatch.setattr(_flex, "flex_attention", watch)
    entries = _flex.kernel(lambda attend: attend)
    one = sequences((9,))
    entries.bind(pack(one, SCALE))()
    entries.bind(page(one, [(8, 9)], SCALE, page_size=16, decode=True))()
    assert seen == [(False, {"FORCE_USE_FLEX_ATTENTION": True}), (False, None)]


def test_new_lengths_are_no_new_compilations() -> None:
    backend = Graphs()
    entries = kernel(backend)
    for tokens in (300, 310, 600):
        entries.bind(pack(sequences((tokens,)), SCALE))()
    assert len(backend.graphs) == 1
    for tokens in (300, 310, 600):
        one = sequences((tokens, tokens // 2))
        spans = [(n - 1, n) for n in (tokens, tokens // 2)]
        entries.bind(page(one, spans, SCALE, page_size=16, decode=True))()
    assert len(backend.graphs) == 2


def test_scale_is_a_constant_of_the_kernel_and_decode_knows_its_batch_size() -> None:
    backend = Graphs()
    entries = kernel(backend)
    for scale in (SCALE, 0.3):
        entries.bind(pack(sequences((300,)), scale))()
        dtypes = {t.dtype for t in backend.inputs() if isinstance(t, torch.Tensor)}
        assert dtypes == {torch.bfloat16, torch.int32}
    for count in (3, 5):
        one = sequences((300,) * count)
        spans = [(299, 300)] * count
        entries.bind(page(one, spans, SCALE, page_size=16, decode=True))()
        tensors = [
            t for t in backend.inputs() if isinstance(t, torch.Tensor) and t.is_floating_point()
        ]
        assert [str(t.shape[0]) for t in tensors] == [str(count)] * 3, "a dynamic one has a name"


def test_too_many_compilations_are_an_error_and_the_limit_is_far() -> None:
    entries = kernel()
    assert dynamo.recompile_limit == dynamo.accumulated_recompile_limit == _flex.RECOMPILES
    entries.bind(pack(sequences((300,)), 0.25))()
    with dynamo.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        entries.bind(pack(sequences((300,)), 0.5))()


def test_cache_rows_are_the_keys_and_padding_repeats_the_last() -> None:
    call = page(sequences((5, 17)), [(4, 5), (16, 17)], SCALE, page_size=4, decode=True)
    assert isinstance(call, PagedDecode)
    rows = _flex.padded_rows(call)
    assert rows.shape == (2, 17)
    assert rows[0].tolist() == [4, 5, 6, 7] + [8] * 13
    keys = call.k_cache.flatten(0, 1)[rows[1]]
    assert torch.equal(keys, sequences((5, 17))[1].whole("k"))


def test_paged_prefill_is_unsupported_and_decode_says_that_it_gathers() -> None:
    entries = kernel()
    with pytest.raises(Unsupported, match="no paged cache"):
        entries.bind(page(sequences(), SPANS, SCALE, page_size=16))
    assert "pages gathered before the launch" in entries.resolved["decode"]


def test_machine_without_a_c_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unavailable, match="install gcc, or set CC"):
        flex.load_attention({}, "cuda:0")
    monkeypatch.setenv("CC", "tcc")
    assert set(flex.load_attention({}, "cuda:0").entries) == {"prefill", "decode", "backward"}


def test_plain_torch_gives_what_the_stand_in_gives() -> None:
    """`dense` is what the backward is held against; it must be attention itself."""
    call = pack(sequences(), SCALE)
    q, k, v = (t.transpose(0, 1)[None] for t in (call.q, call.k, call.v))
    mask = _flex.packed_mask(call)
    out = dense(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    plain = eager.compute(call)["out"]
    assert_rounded(out, plain.double(), "bf16", 3)
