"""Megatron-core's own DotProductAttention, the one its `local` layers use.

It takes dense [tokens, batch, heads, dim] and refuses packed sequences, so every sequence is a
launch of its own; paged keys are copied out of their pages at every run. Its causal mask is for as many queries as
keys; fewer queries get a bottom-right aligned one handed to them. Scores are materialized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Engine

if TYPE_CHECKING:
    import torch

    from rlbench.ops._op import Kernel

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    import torch
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rlbench.ops._op import Kernel, Run
    from rlbench.ops._runs import without_grad
    from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
    from rlbench.ops.attention.eager import gradients, hidden
    from rlbench.ops.attention.paging import unpage

    start_model_parallel()

    def packed(call: PackedPrefill) -> Run:
        attend = bound(call, training=False)
        return without_grad(lambda: {"out": attend(call.q, call.k, call.v)})

    def backward(call: PackedBackward) -> Run:
        q, k, v = (t.detach().clone().requires_grad_() for t in (call.q, call.k, call.v))
        out = bound(call, training=True)(q, k, v)
        return gradients(out, (q, k, v), call.dout)

    def paged(call: PagedPrefill) -> Run:
        same, copy = unpage(call)
        attend = bound(same, training=False)
        return without_grad(lambda: {"out": attend(call.q, *copy())})

    def bound(call: PackedPrefill, *, training: bool) -> Attend:
        """(q, k, v) -> out shaped as q, one launch for each sequence of `call`; padding is zero."""
        module = layer(call).train(training)
        lengths = list(zip(call.q_lens, call.k_lens, strict=True))
        masks = {
            (q_len, k_len): hidden(q_len, k_len, call.q.device)
            for q_len, k_len in lengths
            if call.causal and 1 < q_len < k_len
        }

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            # Split, not sliced: the backward of a slice fills a tensor of the whole size.
            padding = q.shape[0] - sum(call.q_lens)
            *q_parts, _ = torch.split(q[:, None], [*call.q_lens, padding])
            k_parts, v_parts = (torch.split(t[:, None], list(call.k_lens)) for t in (k, v))
            rows = [
                module(*qkv, masks.get(length)).view(-1, *q.shape[1:])
                for *qkv, length in zip(q_parts, k_parts, v_parts, lengths, strict=True)
            ]
            return torch.cat([*rows, q.new_zeros(padding, *q.shape[1:])])

        return attend

    def layer(call: PackedPrefill) -> torch.nn.Module:
        q_heads, dim = call.q.shape[1:]
        config = TransformerConfig(
            num_layers=1,
            hidden_size=q_heads * dim,
            num_attention_heads=q_heads,
            num_query_groups=call.k.shape[1],
            kv_channels=dim,
            attention_dropout=0.0,
            bf16=call.q.dtype == torch.bfloat16,
            fp16=call.q.dtype == torch.float16,
        )
        made: torch.nn.Module = DotProductAttention(
            config,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal if call.causal else AttnMaskType.no_mask,
            attention_type="self",
            softmax_scale=call.softmax_scale,
        )
        return made

    return Kernel(
        {"prefill": packed, "paged-prefill": paged, "decode": paged, "backward": backward},
        resolved={
            "launches": "one a sequence",
            "paged": "keys copied out of the pages at every run",
            "softmax": "torch, in fp32 (attention_softmax_in_fp32, its default)",
        },
    )


def start_model_parallel() -> None:
    """A world of one, as Megatron wants it before any layer: groups, buffer, random states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch.distributed import HashStore, init_process_group, is_initialized  # type: ignore[attr-defined]

    if not is_initialized():
        # gloo: nothing is ever sent. A store in memory: there is no port to collide on.
        init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    # Nothing is dropped, and a fork of the generator's state could not be captured in a graph.
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)


ENGINE = Engine(
    summary="Megatron-core local DotProductAttention",
    distribution="megatron-core",
    modules=("torch", "megatron.core.transformer.dot_product_attention"),
    install="uv pip install megatron-core==0.19.2 (Python 3.12 or newer)",
    load={"attention": load_attention},
)
