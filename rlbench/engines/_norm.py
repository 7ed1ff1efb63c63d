"""What engines of norms have in common: a function of rows, and what it does not offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rlbench.errors import Unsupported
from rlbench.ops._inputs import stream_key, values
from rlbench.ops._op import Kernel, Run
from rlbench.ops.norm.calls import GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward
from rlbench.ops.norm.eager import gradients, inference, rms_norm

_PROBE = 990
"""The stream of the rows by which an engine's convention is told."""
WEIGHTS = {
    "fp32": "multiplied in fp32, before the cast to the input's dtype",
    "after-cast": "multiplied after the cast to the input's dtype",
}
NO_GATE = "offers no gated norm"


Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Norms:
    """An engine's functions, and what they do not offer."""

    plain: Function
    """(x, weight, **arguments(call)) -> y."""
    gated: Function | None = None
    """(x, weight, gate, **arguments(call)) -> y."""
    why_not: Callable[[Any], str | None] = lambda _: None
    """Why they do not offer a call, or None."""
    no_backward: str = ""
    """Why there is no backward, if there is none."""
    arguments: Callable[[Any], dict[str, Any]] = lambda call: {"eps": call.eps}
    conventions: dict[str, str] = field(default_factory=dict)
    """Where the weight is multiplied, by kind of norm: found by looking."""

    def kernel(self) -> Kernel:
        """The entry points. A case of the other convention is refused when it is bound."""
        missing: dict[str, str] = {}
        if self.gated is None:
            missing |= {"gated-forward": NO_GATE, "gated-backward": NO_GATE}
        if self.no_backward:
            missing |= {"backward": self.no_backward, "gated-backward": self.no_backward}
        binders: dict[str, Callable[[Any], Run]] = {
            "forward": self._forward,
            "gated-forward": self._forward,
            "backward": self._backward,
            "gated-backward": self._backward,
        }
        entries = {name: bind for name, bind in binders.items() if name not in missing}
        return Kernel(entries, missing, self.conventions)

    def _forward(self, call: RmsNorm) -> Run:
        self._check(call)
        return inference(*self._parts(call), self.arguments(call))

    def _backward(self, call: RmsNormBackward | GatedRmsNormBackward) -> Run:
        self._check(call)
        return gradients(*self._parts(call), self.arguments(call), call.dout)

    def _parts(self, call: RmsNorm) -> tuple[Function, tuple[torch.Tensor, ...]]:
        if isinstance(call, GatedRmsNorm):
            assert self.gated is not None
            return self.gated, (call.x, call.weight, call.gate)
        return self.plain, (call.x, call.weight)

    def _check(self, call: RmsNorm) -> None:
        """Raises Unsupported for a call that the engine does not offer."""
        reason = self.why_not(call)
        if reason:
            raise Unsupported(reason)
        if call.x.dtype == torch.float32:
            return  # a cast that is none
        kind = "weight, gated" if isinstance(call, GatedRmsNorm) else "weight"
        kind += ", zero-centred" if call.offset else ""
        if kind not in self.conventions:
            function, rest = self._parts(call)[0], self.arguments(call)
            self.conventions[kind] = WEIGHTS[convention(call, partial(function, **rest))]
        wanted = WEIGHTS["after-cast" if call.after_cast else "fp32"]
        if self.conventions[kind] != wanted:
            raise Unsupported(f"the weight is {self.conventions[kind]}; this case has it {wanted}")


def convention(call: RmsNorm, function: Callable[..., torch.Tensor]) -> str:
    """`fp32` or `after-cast`, whichever more of the function's elements have the bits of, on rows made for it."""
    width = call.x.shape[1]
    x, gate = (
        values(stream_key(_PROBE, number), 64 * width, call.x.dtype, str(call.x.device)).view(
            64, width
        )
        for number in range(2)
    )
    gated = isinstance(call, GatedRmsNorm)
    tensors = (x, call.weight, gate) if gated else (x, call.weight)
    rest: dict[str, Any] = {"activation": call.activation} if isinstance(call, GatedRmsNorm) else {}
    with torch.no_grad():
        y = function(*tensors)
        equal = {
            name: int(
                (
                    y
                    == rms_norm(*tensors, eps=call.eps, offset=call.offset, after_cast=cast, **rest)
                ).sum()
            )
            for name, cast in (("fp32", False), ("after-cast", True))
        }
    return max(equal, key=lambda name: equal[name])
