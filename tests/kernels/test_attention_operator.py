"""When a call goes through torch's dispatcher, and when straight to what is behind the operator."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rlbench.kernels.attention import operator


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
