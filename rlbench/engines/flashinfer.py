"""FlashInfer's batch wrappers pinned to a backend: packed prefill, paged prefill, decode.

A wrapper is planned once a batch, on the host; its run launches one JIT-compiled module, one for
each backend, dtype and head dim, shared by the three wrappers. The first plan that needs a module
builds it with nvcc and ninja: 20 s (fa2) to 82 s (fa3) on 16 cores, then cached below
`$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer` (the home directory by default).

Options, both of fa2 alone: for fa3, which never splits keys, plan() would drop them silently.

| option | does |
| --- | --- |
| `fixed_split_size=N` | cuts the keys every N tokens (plan() counts pages: 4096 / page size) |
| `disable_split_kv` | never cuts them; plan() would let it win over a fixed size |

Partial results of split keys are stored at the output's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlbench.engines._engine import Claim, Engine, options_for
from rlbench.errors import Unavailable, Unsupported
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch

    from rlbench.ops._op import Kernel, Run
    from rlbench.ops.attention.calls import PackedPrefill, PagedPrefill

SPLIT_SIZES = ("512", "4096")
"""Tokens: the first splits the sequences whose bits are watched, the second long ones only."""

FA3_HEAD_DIMS = (64, 128, 256)

WORKSPACE_BYTES = 128 * 2**20
"""What the wrappers' documentation recommends to begin with."""

OVERFLOW = "Buffer overflow when allocating memory for batch_prefill_tmp_"
"""How plan() says that the workspace cannot hold the partial results of this batch."""


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from flashinfer import (
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
    )

    from rlbench.ops._op import Kernel

    backend = options["backend"]
    _check(options, device)
    workspace = _Workspace(device)

    def prefill(call: PackedPrefill) -> Run:
        wrapper = workspace.planned(
            lambda buffer: BatchPrefillWithRaggedKVCacheWrapper(buffer, "NHD", backend=backend),
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            *_heads(call.q, call.k),
            causal=call.causal,
            **_common(call, call.k, options, page_size=1),
        )
        return _launch(wrapper, call, call.k, call.v)

    def paged_prefill(call: PagedPrefill) -> Run:
        wrapper = workspace.planned(
            lambda buffer: BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend=backend),
            call.cu_seqlens_q,
            *_pages(call),
            *_heads(call.q, call.k_cache),
            call.page_size,
            causal=call.causal,
            **_common(call, call.k_cache, options, call.page_size),
        )
        return _launch(wrapper, call, (call.k_cache, call.v_cache))

    def decode(call: PagedPrefill) -> Run:
        wrapper = workspace.planned(
            lambda buffer: BatchDecodeWithPagedKVCacheWrapper(
                buffer, "NHD", use_tensor_cores=True, backend=backend
            ),
            *_pages(call),
            *_heads(call.q, call.k_cache),
            call.page_size,
            **_common(call, call.k_cache, options, call.page_size),
        )
        return _launch(wrapper, call, (call.k_cache, call.v_cache))

    return Kernel(
        {"prefill": prefill, "paged-prefill": paged_prefill, "decode": decode},
        unsupported={"backward": "FlashInfer is forward only"},
        resolved={
            "backend": backend,
            "split_kv": _split_in_words(options),
            "decode": "the prefill kernel (use_tensor_cores=True), one query a sequence",
        },
    )


class _Workspace:
    """One float workspace for all wrappers: its contents matter within a run only.

    What must outlive a run, the plan, stands in each wrapper's own int workspace.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._bytes = WORKSPACE_BYTES
        self._buffer: torch.Tensor | None = None

    def planned(self, make: Callable[[torch.Tensor], Any], *args: Any, **given: Any) -> Any:
        """A wrapper with its own plan, over a workspace that is large enough for it.

        Pass tensors of the device: plan() copies them to the host, which waits for the copy out
        of an earlier wrapper's pinned buffer, whose memory the new one may have got.
        """
        while True:
            wrapper = make(self._ready())
            try:
                wrapper.plan(*args, **given)
            except RuntimeError as why:
                if OVERFLOW not in str(why):
                    raise
                self._bytes, self._buffer = 2 * self._bytes, None
            else:
                return wrapper

    def _ready(self) -> torch.Tensor:
        import torch

        if self._buffer is None:
            # The decode wrapper wants zeros on first use.
            self._buffer = torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)
        return self._buffer


def _check(options: Mapping[str, str], device: str) -> None:
    """Refuse what plan() would ignore, and devices that have no such backend."""
    import torch

    splits = sorted({"fixed_split_size", "disable_split_kv"} & set(options))
    if options["backend"] == "fa3":
        if splits:
            raise Unsupported(f"FlashInfer's fa3 backend ignores {splits[0]}: it never splits keys")
        major, minor = torch.cuda.get_device_capability(device)
        if major != 9:
            raise Unavailable(
                "FlashInfer's fa3 backend needs compute capability 9.x, "
                f"this device has {major}.{minor}"
            )
    if len(splits) > 1:
        raise Unsupported("FlashInfer ignores fixed_split_size when disable_split_kv is set")


def _common(
    call: PackedPrefill | PagedPrefill, k: torch.Tensor, options: Mapping[str, str], page_size: int
) -> dict[str, Any]:
    """The arguments that all plans take by these names."""
    if options["backend"] == "fa3" and call.q.shape[2] not in FA3_HEAD_DIMS:
        raise Unsupported(f"FlashInfer's fa3 backend has no kernel for head dim {call.q.shape[2]}")
    arguments: dict[str, Any] = {
        "sm_scale": call.softmax_scale,
        "q_data_type": call.q.dtype,
        "kv_data_type": k.dtype,
    }
    if "fixed_split_size" in options:
        pages, rest = divmod(int(options["fixed_split_size"]), page_size)
        if rest:
            raise Unsupported(f"fixed_split_size counts whole pages, these have {page_size} tokens")
        arguments["fixed_split_size"] = pages
    if "disable_split_kv" in options:
        arguments["disable_split_kv"] = True
    return arguments


def _heads(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int, int]:
    """(q_heads, kv_heads, head_dim)."""
    return q.shape[1], k.shape[-2], q.shape[2]


def _pages(call: PagedPrefill) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The block table as plan() takes it, int32: paged_kv_indptr [n + 1], indices, last_page_len [n].

    `indices` has the pages in use only, sequence by sequence.
    """
    import torch

    table, size = call.block_table, call.page_size
    counts = (call.seqused_k + size - 1) // size
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return indptr, table[used], call.seqused_k - (counts - 1) * size


def _launch(wrapper: Any, call: PackedPrefill | PagedPrefill, *kv: Any) -> Run:
    """A run of a planned wrapper; it refuses padding rows, so it is not shown them."""
    import torch

    rows = sum(call.q_lens)
    q = call.q[:rows]

    def run() -> dict[str, torch.Tensor]:
        out = torch.empty_like(call.q)
        wrapper.run(q, *kv, out=out[:rows])
        return {"out": out}

    return run


def _split_in_words(options: Mapping[str, str]) -> str:
    if options["backend"] == "fa3" or "disable_split_kv" in options:
        return "never"
    size = options.get("fixed_split_size")
    return f"every {size} tokens" if size else "auto"


def load_norm(options: Mapping[str, str], device: str) -> Kernel:
    from flashinfer.norm import gemma_rmsnorm, rmsnorm

    from rlbench.engines._norm import NO_BACKWARD, Norms
    from rlbench.ops.norm.calls import RmsNorm

    def why_not(call: RmsNorm) -> str | None:
        return None if call.x.element_size() == 2 else "its norms take bf16 and fp16"

    def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
        y: torch.Tensor = (gemma_rmsnorm if offset else rmsnorm)(x, weight, eps)
        return y

    return Norms(norm, offsets=(0.0, 1.0), why_not=why_not, no_backward=NO_BACKWARD).kernel()


ENGINE = Engine(
    summary="FlashInfer's batch wrappers pinned to one backend, and its norms",
    distribution="flashinfer-python",
    modules=("torch", "flashinfer.prefill", "tvm_ffi"),
    install="uv pip install flashinfer-python==0.6.14",
    load={"attention": load_attention, "norm": load_norm},
    variants_of={"norm": ((),)},
    variants=(
        *options_for(backend=("fa2", "fa3")),
        *options_for(backend=("fa2",), fixed_split_size=SPLIT_SIZES),
        *options_for(backend=("fa2",), disable_split_kv=("",)),
    ),
    claims=tuple(
        Claim(
            Property.BATCH_INVARIANT,
            "fixed_split_size of BatchPrefillWithPagedKVCacheWrapper.plan: "
            '"batch-size invariant outputs"',
            when={"backend": "fa2", "fixed_split_size": size},
        )
        for size in SPLIT_SIZES
    ),
    min_capability=(8, 0),
)
