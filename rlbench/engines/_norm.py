"""What engines of norms have in common: a function of rows, and what it does not offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rlbench.errors import Unsupported
from rlbench.ops._inputs import stream_key, values
from rlbench.ops._op import Kernel, Run
from rlbench.ops.norm.calls import (
    GatedRmsNorm,
    GatedRmsNormBackward,
    RmsNorm,
    RmsNormBackward,
    by_entry,
)
from rlbench.ops.norm.eager import Function, compute, gradients, inference

_PROBE = 990
"""The stream of the rows by which an engine's convention is told."""
_PROBE_ROWS = 64
WEIGHTS = {
    "fp32": "multiplied in fp32, before the cast to the input's dtype",
    "after-cast": "multiplied after the cast to the input's dtype",
}
NO_GATE = "offers no gated norm"
NO_BACKWARD = "offers no backward"


@dataclass(frozen=True)
class Norms:
    """An engine's functions, and what they do not offer."""

    plain: Function
    """(x, weight, eps=, offset=) -> y."""
    gated: Function | None = None
    """(x, weight, gate, eps=, offset=, activation=) -> y."""
    offsets: tuple[float, ...] = (0.0,)
    """What they can add to the weight."""
    why_not: Callable[[RmsNorm], str | None] = lambda _: None
    """Why else they do not offer a call, or None."""
    no_backward: str = ""
    """Why there is no backward, if there is none."""
    conventions: dict[str, str] = field(default_factory=dict)
    """Where the weight is multiplied, by kind of norm: found by looking."""

    def kernel(self) -> Kernel:
        """The entry points. A case of the other convention is refused when it is bound."""
        missing: dict[str, str] = {}
        if self.gated is None:
            missing |= {"gated-forward": NO_GATE, "gated-backward": NO_GATE}
        if self.no_backward:
            missing |= {"backward": self.no_backward, "gated-backward": self.no_backward}
        binders = by_entry(self._forward, self._backward)
        entries = {name: bind for name, bind in binders.items() if name not in missing}
        return Kernel(entries, missing, self.conventions)

    def _forward(self, call: RmsNorm) -> Run:
        return inference(call, self._checked(call))

    def _backward(self, call: RmsNormBackward | GatedRmsNormBackward) -> Run:
        return gradients(call, self._checked(call))

    def _checked(self, call: RmsNorm) -> Function:
        """The function of the call's tensors. Raises Unsupported where the engine does not offer it."""
        if call.offset not in self.offsets:
            numbers = " or ".join(f"{offset:g}" for offset in self.offsets)
            raise Unsupported(f"adds {numbers} to the weight; this case has {call.offset:g}")
        reason = self.why_not(call)
        if reason:
            raise Unsupported(reason)
        function = self.gated if isinstance(call, GatedRmsNorm) else self.plain
        assert function is not None
        bound = partial(function, **call.arguments)
        if call.x.dtype != torch.float32:  # to which a cast is none
            self._check_convention(call, bound)
        return bound

    def _check_convention(self, call: RmsNorm, function: Function) -> None:
        kind = "weight, gated" if isinstance(call, GatedRmsNorm) else "weight"
        kind += ", zero-centred" if call.offset else ""
        if kind not in self.conventions:
            self.conventions[kind] = WEIGHTS[convention(call, function)]
        wanted = WEIGHTS["after-cast" if call.after_cast else "fp32"]
        if self.conventions[kind] != wanted:
            raise Unsupported(f"the weight is {self.conventions[kind]}; this case has it {wanted}")


def convention(call: RmsNorm, function: Function) -> str:
    """`fp32` or `after-cast`, whichever more of the function's elements have the bits of, on rows made for it."""

    def rows(number: int) -> torch.Tensor:
        width = call.x.shape[1]
        key, device = stream_key(_PROBE, number), str(call.x.device)
        return values(key, _PROBE_ROWS * width, call.x.dtype, device).view(_PROBE_ROWS, width)

    common: dict[str, Any] = {"x": rows(0), "weight": call.weight, "eps": call.eps}
    common |= {"offset": call.offset, "after_cast": False}
    probe = RmsNorm(**common)
    if isinstance(call, GatedRmsNorm):
        probe = GatedRmsNorm(**common, gate=rows(1), activation=call.activation)
    y = inference(probe, function)()["y"]
    equal = {
        name: int((y == compute(replace(probe, after_cast=name == "after-cast"))["y"]).sum())
        for name in WEIGHTS
    }
    return max(equal, key=lambda name: equal[name])
