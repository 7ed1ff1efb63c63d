"""What the typed attention call refuses and infers, on fake tensors: no GPU, nothing compiled."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlbench.kernels.attention import attention

if TYPE_CHECKING:
    from collections.abc import Iterator

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def tensor(*shape: int, dtype: torch.dtype = BF16, device: str = "cuda") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=BF16, device="cuda")


def index(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


def packed(**changes: Any) -> dict[str, Any]:
    return {
        "q": tensor(10, 8, 128),
        "k": tensor(20, 2, 128),
        "v": tensor(20, 2, 128),
        "cu_seqlens_q": index(3),
        "cu_seqlens_k": index(3),
        "max_seqlen_q": 7,
    } | changes


def paged(**changes: Any) -> dict[str, Any]:
    return {
        "q": tensor(10, 8, 128),
        "k": tensor(5, 16, 2, 128),
        "v": tensor(5, 16, 2, 128),
        "cu_seqlens_q": index(3),
        "block_table": index(2, 4),
        "seqused_k": index(2),
        "max_seqlen_q": 7,
    } | changes


@pytest.mark.parametrize("arguments", [packed, paged])
def test_result_has_qs_shape_and_a_float32_lse(arguments: Any) -> None:
    out, lse = attention(**arguments(return_lse=True, max_seqlen_k=20))
    assert (out.shape, out.dtype) == ((10, 8, 128), BF16)
    assert (lse.shape, lse.dtype) == ((10, 8), torch.float32)
    given = tensor(10, 8, 128)
    assert attention(**arguments(out=given)) is given


def test_rows_may_be_strided() -> None:
    fused = (12 * 128, 128, 1)  # q, k and v cut out of one [tokens, 8 + 2 + 2, 128]
    q, k = strided((10, 8, 128), fused), strided((20, 2, 128), fused)
    attention(**packed(q=q, k=k, v=k))


REFUSED = [
    (packed, lambda: {"q": tensor(10, 8, 128, device="cpu")}, ValueError, "q is on cpu"),
    (packed, lambda: {"q": tensor(10, 8, 128, dtype=torch.float32)}, TypeError, "q is torch.float"),
    (packed, lambda: {"q": tensor(10, 8, 96)}, ValueError, r"q has head_dim 96.*64, 128, 256"),
    (packed, lambda: {"q": tensor(10, 1024)}, ValueError, r"q has shape \(10, 1024\)"),
    (packed, lambda: {"q": tensor(10, 7, 128)}, ValueError, "q has 7 heads and k 2"),
    (
        packed,
        lambda: {"q": strided((10, 8, 128), (1032, 129, 1))},
        ValueError,
        "q has strides.*of 8",
    ),
    (packed, lambda: {"k": tensor(2, 20, 2, 128)}, ValueError, "k has shape.*without block_table"),
    (packed, lambda: {"k": tensor(20, 2, 64), "v": tensor(20, 2, 64)}, ValueError, "k has head_d"),
    (packed, lambda: {"k": tensor(20, 2, 128, dtype=torch.float16)}, TypeError, "k is torch.flo"),
    (packed, lambda: {"v": tensor(19, 2, 128)}, ValueError, r"v has shape \(19, 2, 128\)"),
    (
        packed,
        lambda: {"v": strided((20, 2, 128), (256, 1, 2))},
        ValueError,
        "v has strides.*contiguous",
    ),
    (packed, lambda: {"out": tensor(11, 8, 128)}, ValueError, r"out has shape \(11, 8, 128\)"),
    (packed, lambda: {"cu_seqlens_q": index(3).long()}, TypeError, "cu_seqlens_q is torch.int64"),
    (packed, lambda: {"cu_seqlens_q": index(3, 1)}, ValueError, r"it must be \[sequences \+ 1\]"),
    (packed, lambda: {"cu_seqlens_q": index(0)}, ValueError, "cu_seqlens_q is empty"),
    (packed, lambda: {"cu_seqlens_k": index(4)}, ValueError, "cu_seqlens_k has 4 entries"),
    (packed, lambda: {"cu_seqlens_k": None}, ValueError, "cu_seqlens_k is missing"),
    (packed, lambda: {"seqused_k": index(2)}, ValueError, "seqused_k is given without block_tab"),
    (packed, lambda: {"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1"),
    (packed, lambda: {"max_seqlen_q": index(1)}, TypeError, "max_seqlen_q is a FakeTensor"),
    (packed, lambda: {"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0"),
    (packed, lambda: {"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    (paged, lambda: {"k": tensor(80, 2, 128)}, ValueError, "k has shape.*with block_table"),
    (paged, lambda: {"cu_seqlens_k": index(3)}, ValueError, "cu_seqlens_k is given with block_t"),
    (paged, lambda: {"seqused_k": None}, ValueError, "seqused_k is missing"),
    (paged, lambda: {"seqused_k": index(3)}, ValueError, "seqused_k has 3 entries"),
    (paged, lambda: {"block_table": index(3, 4)}, ValueError, "block_table has 3 rows"),
    (paged, lambda: {"block_table": index(8)}, ValueError, r"it must be \[sequences, max_pages\]"),
]


@pytest.mark.parametrize(
    ("arguments", "changes", "error", "message"), REFUSED, ids=[case[3] for case in REFUSED]
)
def test_refusals_name_the_argument(
    arguments: Any, changes: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attention(**arguments(**changes()))


def test_gradients_of_pages_and_through_out_are_refused() -> None:
    q = tensor(10, 8, 128).requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient of pages"):
        attention(**paged(q=q))
    with pytest.raises(ValueError, match="out is given where a gradient is needed"):
        attention(**packed(q=q, out=tensor(10, 8, 128)))
    with torch.no_grad():
        attention(**paged(q=q))
        attention(**packed(q=q, out=tensor(10, 8, 128)))


def test_importing_the_package_leaves_torch_alone() -> None:
    program = (
        "import sys, rlbench.kernels as kernels\n"
        "assert 'torch' not in sys.modules and 'cuda' not in sys.modules\n"
        "import rlbench.kernels.attention\n"
        "assert callable(kernels.attention) and 'attention' in dir(kernels)\n"
        "from rlbench.kernels import attention\n"
        "assert attention is kernels.attention\n"
        "assert 'cuda.core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
