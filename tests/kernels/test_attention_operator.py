"""When a call goes through torch's dispatcher, when straight to what is behind the operator, and
when it is checked."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlbench.kernels.attention import operator
from rlbench.kernels.attention.launch import Plan, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def test_operator_is_gone_through_only_where_somebody_looks() -> None:
    plain = torch.zeros(1, 2, 64)
    assert operator.entry(plain) is operator._forward
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(plain)
        assert operator.entry(plain) is operator.attention_forward, "a mode is on"
    assert operator.entry(fake) is operator.attention_forward


def test_compiled_code_goes_through_the_operator() -> None:
    def ask(q: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return q + 1, operator.entry(q) is operator.attention_forward

    plain = torch.zeros(1, 2, 64)
    assert ask(plain)[1] is False
    assert torch.compile(ask, backend="eager", fullgraph=True)(plain)[1] is True


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Counts calls that are checked; there is nothing to launch for any."""
    monkeypatch.setattr(operator, "_plans", {})
    monkeypatch.setattr(operator, "_plan", lambda request: Plan(0, (), 0))
    with mock.patch.object(operator, "check") as it:
        yield it


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def arguments() -> dict[str, Any]:
    """Of a decode step on pages."""
    index = torch.int32
    return {
        "q": tensor(4, 8, 64),
        "k": tensor(9, 16, 2, 64),
        "v": tensor(9, 16, 2, 64),
        "out": tensor(4, 8, 64),
        "lse": None,
        "cu_seqlens_q": tensor(5, dtype=index),
        "cu_seqlens_k": None,
        "block_table": tensor(4, 3, dtype=index),
        "seqused_k": tensor(4, dtype=index),
        "max_seqlen_q": 1,
        "splits": 1,
        "causal": True,
        "softmax_scale": 0.125,
    }


OTHERS: dict[str, Any] = {
    "max_seqlen_q": 2,
    "splits": 2,
    "causal": False,
    "softmax_scale": 0.25,
    "lse": tensor(4, 8, dtype=torch.float32),
    "cu_seqlens_k": tensor(5, dtype=torch.int32),
    "block_table": None,
    "seqused_k": None,
}
TENSORS = ("q", "k", "v", "out", "cu_seqlens_q", "block_table", "seqused_k")


def test_a_call_like_an_earlier_one_is_not_checked_again(checked: mock.Mock) -> None:
    for _ in range(3):  # with new tensors
        operator._forward(**arguments())
    assert checked.call_count == 1


def test_calls_are_recognized_without_what_torch_does_not_promise(
    checked: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "TensorGuards", None)
    for _ in range(3):
        operator._forward(**arguments())
    assert checked.call_count == 1
    operator._forward(**arguments() | {"q": tensor(4, 4, 64), "out": tensor(4, 4, 64)})
    assert checked.call_count == 2


@pytest.mark.parametrize("name", OTHERS)
def test_a_call_with_another_value_is_checked(name: str, checked: mock.Mock) -> None:
    operator._forward(**arguments())
    checked.side_effect = ValueError("as it should")
    with pytest.raises(ValueError, match="as it should"):
        operator._forward(**arguments() | {name: OTHERS[name]})
    operator._forward(**arguments())


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.double(),
        lambda t: t.to("meta"),
        lambda t: t[:-1],
        lambda t: t[None],
        lambda t: t.new_zeros((*t.shape[:-1], 2 * t.shape[-1]))[..., ::2],  # other strides
        lambda t: t.to_sparse(),
        lambda t: t.resize_(t.shape[0] - 1, *t.shape[1:]),  # the same object
    ],
    ids=["dtype", "device", "shape", "rank", "strides", "layout", "resized"],
)
def test_a_call_with_another_tensor_is_checked(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], checked: mock.Mock
) -> None:
    given = arguments()
    operator._forward(**given)
    checked.side_effect = ValueError("as it should")
    with pytest.raises(ValueError, match="as it should"):
        operator._forward(**given | {name: change(given[name])})


def test_tensors_may_be_the_same(checked: mock.Mock) -> None:
    """What compares tensors takes none twice: such calls are only recognized more slowly."""
    given = arguments() | {"block_table": None, "seqused_k": None}
    same = given | {"cu_seqlens_k": given["cu_seqlens_q"]}
    other = given | {"cu_seqlens_k": given["cu_seqlens_q"].clone()}
    for call in (same, other, same, same | {"v": same["k"]}, other | {"v": same["k"]}):
        operator._forward(**call)
    assert checked.call_count == 2


def test_calls_are_recognized_in_inference_mode_and_outside(checked: mock.Mock) -> None:
    given = arguments()
    for _ in range(2):
        operator._forward(**given)
        with torch.inference_mode():
            operator._forward(**given)
            operator._forward(**arguments())
    assert checked.call_count == 1


def test_a_kept_number_of_calls_is_not_exceeded(
    checked: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "KEPT", 4)
    for splits in range(1, 30):
        operator._forward(**arguments() | {"splits": splits})
        assert len(operator._plans) <= 2 * 4
    assert checked.call_count == 29


@pytest.mark.parametrize("current", [0, 1])
def test_launches_are_on_the_tensors_device(
    current: int, checked: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = (mock.Mock(),)
    monkeypatch.setattr(operator, "_plan", lambda request: Plan(1, launches, 0))
    now = [current]

    @contextmanager
    def device(number: int) -> Iterator[None]:
        now.append(number)
        yield
        now.pop()

    given = arguments()
    with (
        mock.patch.object(torch._C, "_cuda_getDevice", side_effect=lambda: now[-1], create=True),
        mock.patch.object(torch.cuda, "device", device),
        mock.patch.object(
            Runner, "__call__", side_effect=lambda *_: used.append(now[-1])
        ) as runner,
    ):
        used: list[int] = []
        operator._forward(**given)
    assert used == [1]
    assert now == [current]
    # No lse, and scratch memory is not known yet.
    names = ("q", "k", "v", "out", None, None, "cu_seqlens_q", "seqused_k", "block_table")
    assert runner.call_args.args == tuple(given[n].data_ptr() if n else 0 for n in names)


def test_misaligned_tensors_are_refused(checked: mock.Mock) -> None:
    given = arguments()
    operator._forward(**given)
    moved = tensor(4 * 8 * 64 + 1)[1:].view(4, 8, 64)
    with pytest.raises(ValueError, match="16-byte boundaries"):
        operator._forward(**given | {"out": moved})
