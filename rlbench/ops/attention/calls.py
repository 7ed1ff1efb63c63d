"""What an attention engine is handed: one dataclass an entry point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch


class _Attention:
    """What every call has."""

    q: torch.Tensor
    cu_seqlens_q: torch.Tensor
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    softmax_scale: float
    causal: bool

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"out": tuple(self.q.shape)}

    @property
    def sizes(self) -> dict[str, int]:
        """What of this call engines choose their path by."""
        return {
            "sequences": len(self.q_lens),
            "total_q": int(self.q.shape[0]),
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
        }

    @property
    def max_seqlen_q(self) -> int:
        return max(self.q_lens)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.k_lens)

    def varlen(self) -> dict[str, Any]:
        """The arguments that every variable-length attention function takes by these names."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
        }


@dataclass(frozen=True)
class PackedPrefill(_Attention):
    """Packed variable-length sequences with their own keys and values, contiguous.

    q [total_q, q_heads, head_dim], k and v [total_k, kv_heads, head_dim], bf16 or fp16;
    cu_seqlens_q and cu_seqlens_k int32 [sequences + 1]. `total_q` may exceed the last entry of
    cu_seqlens_q: padding, whose output is never read. q_lens and k_lens are the same lengths on
    the host. Output: `out`, shaped as q.
    """

    entry: ClassVar[str] = "prefill"
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    softmax_scale: float
    causal: bool = True

    def varlen(self) -> dict[str, Any]:
        return {**super().varlen(), "cu_seqlens_k": self.cu_seqlens_k}


@dataclass(frozen=True)
class PagedPrefill(_Attention):
    """Packed queries against keys and values in a paged cache.

    q [total_q, q_heads, head_dim]; k_cache and v_cache [blocks, page_size, kv_heads, head_dim];
    block_table int32 [sequences, max_blocks]; seqused_k int32 [sequences]: keys of each sequence,
    its own new tokens included. Output: `out`, shaped as q.
    """

    entry: ClassVar[str] = "paged-prefill"
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seqused_k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    softmax_scale: float
    causal: bool = True

    @property
    def page_size(self) -> int:
        return int(self.k_cache.shape[1])

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "page_size": self.page_size}


@dataclass(frozen=True)
class PagedDecode(PagedPrefill):
    """One query a sequence: q [sequences, q_heads, head_dim]. Otherwise as PagedPrefill."""

    entry: ClassVar[str] = "decode"


@dataclass(frozen=True, kw_only=True)
class PackedBackward(PackedPrefill):
    """The gradients of a packed prefill: `dq`, `dk`, `dv`, shaped as q, k, v.

    dout [total_q, q_heads, head_dim]. The forward belongs into the binding, the backward into
    the run.
    """

    entry: ClassVar[str] = "backward"
    dout: torch.Tensor

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"d{name}": tuple(getattr(self, name).shape) for name in ("q", "k", "v")}
