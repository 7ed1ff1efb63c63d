"""Transformer Engine's DotProductAttention over packed (THD) sequences, as trainers call it.

Which backend computes (cuDNN, a FlashAttention, unfused torch) is TE's own choice by shape, read
after the call and told in `resolved`. `padding_causal` is aligned top-left, so whole sequences
take it and shorter queries `padding_causal_bottom_right`. Rows beyond the last sequence are TE's
"THD tail padding". Its paged cache is filled by TE itself, so ours is copied out of its pages
at every run.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlbench.engines import _cudnn
from rlbench.engines._engine import Claim, Engine
from rlbench.errors import Unavailable, Unsupported
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    import torch

    from rlbench.ops._op import Kernel, Outputs, Run
    from rlbench.ops.attention.calls import PackedPrefill

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CHOOSER = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
"""The module that keeps, in `_attention_backends`, what it chose last."""
HOPPER = 9
WORKSPACE_MENDED = (9, 18)
"""Before this cuDNN, its packed backward on Hopper reads workspace that nobody has initialized, and
the gradients are wrong or NaN (github.com/NVIDIA/TransformerEngine/issues/2186)."""
NO_BACKEND = "No dot product attention backend is available"
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    # The module reads it when it is made; both ways, so that a variant is what its name says.
    os.environ[NONDETERMINISTIC] = "0" if "deterministic" in options else "1"
    try:
        import transformer_engine.pytorch as te
    except (AssertionError, OSError) as why:  # versions that do not fit, a library that is missing
        raise Unavailable(f"Transformer Engine does not load: {why}") from why

    import torch

    from rlbench.ops._op import Kernel
    from rlbench.ops._runs import without_grad
    from rlbench.ops.attention.calls import PackedBackward, PagedPrefill
    from rlbench.ops.attention.eager import gradients
    from rlbench.ops.attention.paging import unpage

    choice = importlib.import_module(CHOOSER)._attention_backends  # noqa: SLF001  # no other way
    cudnn = tuple(te.get_cudnn_version())
    resolved = {
        "cudnn": ".".join(map(str, cudnn)),
        "deterministic": str("deterministic" in options),
        "paged": "keys copied out of the pages at every run",
    }

    torchs = _cudnn.version()
    if torchs not in ("none", resolved["cudnn"]):
        # Then TE may find its own cuDNN unfit for anything, and fall back without a word.
        resolved["cudnn"] += (
            f", while torch has {torchs}; CUDNN_HOME says which one Transformer Engine loads "
            "(docs/environments.md)"
        )

    if cudnn < WORKSPACE_MENDED and torch.cuda.get_device_capability(device)[0] == HOPPER:
        resolved["backward"] = (
            "this cuDNN reads workspace that it has not initialized; mended in 9.18 "
            "(TransformerEngine issue 2186)"
        )

    def packed(call: PackedPrefill) -> Run:
        attend = bound(call, call.entry, training=False)
        return without_grad(lambda: {"out": attend(call.q, call.k, call.v)})

    def paged(call: PagedPrefill) -> Run:
        same, copy = unpage(call)
        attend = bound(same, call.entry, training=False)
        return without_grad(lambda: {"out": attend(call.q, *copy())})

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        out = bound(call, call.entry, training=True)(q, k, v)
        return repeatable(out, gradients(out, (q, k, v), call.dout))

    def bound(call: PackedPrefill, entry: str, *, training: bool) -> Attend:
        attend = attention(te, call, training=training)
        use = f"{entry}, {call.q.shape[1]}/{call.k.shape[1]} heads of {call.q.shape[2]}"

        def attend_and_tell(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = attend(q, k, v)
            resolved[f"{backend(choice)}, {use}"] = "used"
            return out

        return attend_and_tell

    return Kernel(
        {"prefill": packed, "paged-prefill": paged, "decode": paged, "backward": backward},
        resolved=resolved,
    )


def attention(te: Any, call: PackedPrefill, *, training: bool) -> Attend:
    """(q, k, v) -> out shaped as q, over the sequences of `call`."""
    q_heads, dim = call.q.shape[1:]
    whole = call.q_lens == call.k_lens
    module = te.DotProductAttention(
        q_heads,
        dim,
        num_gqa_groups=call.k.shape[1],
        qkv_format="thd",
        attn_mask_type=mask(call.causal, whole),
        # "self" takes the keys' lengths from the queries where the unfused backend makes a mask.
        attention_type="self" if whole else "cross",
        softmax_scale=call.softmax_scale,
    )
    module = module.to(call.q.device).train(training)
    lengths = {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_kv": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_kv": call.max_seqlen_k,
    }

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        try:
            out: torch.Tensor = module(q, k, v, **lengths)
        except ValueError as why:
            if NO_BACKEND not in str(why):
                raise
            raise Unsupported(f"TE has no backend for head dim {dim}, {q.dtype}") from why
        return out.view(q.shape)

    return attend


def mask(causal: bool, whole: bool) -> str:
    """TE's name of the mask; `whole`: every sequence has as many queries as keys."""
    if not causal:
        return "padding"
    return "padding_causal" if whole else "padding_causal_bottom_right"


def backend(chosen: Mapping[str, Any]) -> str:
    """What TE's record of its last choice says, in its log's words."""
    if chosen["use_flash_attention"]:
        return f"FlashAttention {chosen['flash_attention_backend']}"
    if chosen["use_fused_attention"]:
        return f"FusedAttention (cuDNN sub-backend {int(chosen['fused_attention_backend'])})"
    return "UnfusedDotProductAttention"


def repeatable(out: torch.Tensor, run: Run) -> Run:
    """`run`, a backward of `out`, able to run again.

    TE's autograd functions drop what they hold besides saved tensors once they have run backward
    (`ctx.tensor_objects = None`), and refuse a second time. The tensors themselves are kept with
    the graph, so putting the rest back repeats the backward, and nothing of the forward.
    """
    held = [(node, dict(vars(node))) for node in python_nodes(out)]

    def again() -> Outputs:
        for node, attributes in held:
            vars(node).update(attributes)
        return run()

    return again


def python_nodes(out: torch.Tensor) -> Iterator[Any]:
    """The nodes of the graph behind `out` that are autograd functions written in Python."""
    from torch.autograd.function import BackwardCFunction

    waiting: list[Any] = [out.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            yield node


def load_norm(options: Mapping[str, str], device: str) -> Kernel:
    import torch
    from transformer_engine.pytorch import RMSNorm

    from rlbench.engines._norm import Norms

    @functools.cache
    def module(width: int, dtype: torch.dtype, eps: float, offset: float) -> torch.nn.Module:
        """Made once, as a model's are: it fills a weight of its own."""
        made: torch.nn.Module = RMSNorm(
            width, eps, params_dtype=dtype, zero_centered_gamma=bool(offset), device=device
        )
        return made

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
        its_module = module(x.shape[1], x.dtype, eps, offset)
        y: torch.Tensor = torch.func.functional_call(its_module, {"weight": weight}, (x,))
        return y

    return Norms(
        norm,
        offsets=(0.0, 1.0),
        no_backward="its backward cannot be run twice for one forward, so it is not measured here",
    ).kernel()


ENGINE = Engine(
    summary="Transformer Engine DotProductAttention, THD, and RMSNorm",
    distribution="transformer-engine",
    modules=("torch", CHOOSER),
    install="uv pip install --no-build-isolation 'transformer-engine[pytorch,core-cu13]==2.20.2'",
    load={"attention": load_attention, "norm": load_norm},
    variants_of={"norm": ((),)},
    variants=((), (("deterministic", ""),)),
    claims=(
        Claim(
            Property.BACKWARD_DETERMINISTIC,
            "docs/envvars.rst: with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 only deterministic "
            "algorithms are allowed",
            when={"deterministic": ""},
        ),
    ),
    min_capability=(8, 0),
)
