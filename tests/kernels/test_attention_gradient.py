"""How autograd gets to the backward, on the CPU: nothing is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from rlbench.kernels.attention import attention, backward, gradient, operator
from rlbench.kernels.attention.launch import Plan, Runner

if TYPE_CHECKING:
    from collections.abc import Iterator


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    return {
        "q": tensor(5, 8, 64).requires_grad_(),
        "k": tensor(7, 2, 64).requires_grad_(),
        "v": tensor(7, 2, 64),
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": torch.tensor([0, 3, 7], dtype=torch.int32),
        "max_seqlen_q": 3,
    } | changes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The backward's pointers; the forward launches nothing."""
    monkeypatch.setattr(operator, "_plans", {})
    monkeypatch.setattr(operator, "_plan", lambda _: Plan(0, (), 0))
    monkeypatch.setattr(operator, "check", lambda *_: None)
    monkeypatch.setattr(gradient, "_plans", {})
    monkeypatch.setattr(gradient, "_plan", lambda _: Plan(0, (mock.Mock(),), 40, backward.DELTA))
    monkeypatch.setattr(gradient, "check_backward", mock.Mock())
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    pointers: list[tuple[int, ...]] = []
    with mock.patch.object(Runner, "__call__", side_effect=lambda *given: pointers.append(given)):
        yield pointers


def test_gradients_are_zeros_where_nothing_is_written(launched: list[tuple[int, ...]]) -> None:
    given = arguments()
    out = attention(**given)
    assert out.requires_grad
    out.backward(torch.ones_like(out))
    for name in ("q", "k"):
        grad = given[name].grad
        assert (grad.shape, grad.dtype) == (given[name].shape, torch.bfloat16)
        assert not grad.any()
    assert given["v"].grad is None
    assert len(launched) == 1


def test_pointers_are_in_the_kernels_order(launched: list[tuple[int, ...]]) -> None:
    given = arguments()
    dout = tensor(5, 8, 64)
    attention(**given).backward(dout)
    ((*pointers,),) = launched
    assert len(pointers) == 12
    assert pointers[:3] == [given[name].data_ptr() for name in "qkv"]
    assert pointers[5] == dout.data_ptr()
    assert pointers[backward.DELTA] == 0, "where scratch memory will be"
    assert pointers[10:] == [given[f"cu_seqlens_{name}"].data_ptr() for name in "qk"]


def test_a_dout_that_kernels_cannot_read_is_copied(launched: list[tuple[int, ...]]) -> None:
    given = arguments()
    out = attention(**given)
    one = tensor(1)
    out.backward(one.expand(out.shape))  # as that of a sum
    assert launched[0][5] not in (0, one.data_ptr())


def test_a_call_of_a_known_kind_is_not_checked_again(launched: list[tuple[int, ...]]) -> None:
    check = vars(gradient)["check_backward"]
    for _ in range(2):
        attention(**arguments()).sum().backward()
    assert check.call_count == 1
    attention(**arguments(causal=False)).sum().backward()
    assert check.call_count == 2


def test_log_sum_exp_has_no_gradient(launched: list[tuple[int, ...]]) -> None:
    out, lse = attention(**arguments(), return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad


def test_second_gradients_are_refused(launched: list[tuple[int, ...]]) -> None:
    given = arguments()
    dout = tensor(5, 8, 64).requires_grad_()
    (dq,) = torch.autograd.grad(attention(**given), given["q"], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dout": tensor(5, 8, 32)}, r"dout has shape \(5, 8, 32\) and q \(5, 8, 64\)"),
        ({"dk": tensor(7, 8, 64)}, r"dk has shape \(7, 8, 64\) and k \(7, 2, 64\)"),
        ({"dv": tensor(7, 2, 64, dtype=torch.float16)}, "dv is torch.float16 and q torch.bfloat16"),
        ({"dq": tensor(5, 8, 128)[..., ::2]}, "dq has strides"),
        ({"lse": tensor(5, 8)}, "lse is torch.bfloat16"),
    ],
)
def test_what_kernels_could_not_take_is_refused(changes: dict[str, Any], match: str) -> None:
    q, k = tensor(5, 8, 64), tensor(7, 2, 64)
    tensors: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": k,
        "out": q,
        "lse": tensor(5, 8, dtype=torch.float32),
    }
    tensors |= {"dout": q, "dq": q, "dk": k, "dv": k} | changes
    offsets = torch.zeros(3, dtype=torch.int32)
    rest: dict[str, Any] = {"max_seqlen_q": 3, "causal": True, "softmax_scale": 1.0}
    with (
        mock.patch("rlbench.kernels.attention.checks._check_query"),
        pytest.raises((ValueError, TypeError), match=match),
    ):
        gradient._backward(**tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **rest)
