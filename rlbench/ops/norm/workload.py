"""A case's tensors and questions: what scenarios ask the op for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rlbench.measure.bits import joint_digest
from rlbench.ops._op import Call, Case, Exam, Outputs, Point, Variation
from rlbench.ops.norm import eager, reference
from rlbench.ops.norm.calls import GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward
from rlbench.ops.norm.inputs import Rows, weight
from rlbench.ops.norm.sizes import sizes
from rlbench.ops.norm.variations import SCENARIOS, Around

EPS = 1e-6
_EXAM = 900
_TIMED = 950
"""Streams of the rows that are examined and timed; the variations' are below."""
_KINDS: dict[tuple[str, bool], type[RmsNorm]] = {
    ("forward", False): RmsNorm,
    ("forward", True): GatedRmsNorm,
    ("backward", False): RmsNormBackward,
    ("backward", True): GatedRmsNormBackward,
}


class NormWorkload:
    """The norm's variations, exams and latency points for one case on one device."""

    def __init__(self, case: Case, preset: str, device: str) -> None:
        self.case = case
        self.device = device
        self.sizes = sizes(case, preset)
        self.width, self.heads = case.params["width"], case.params["heads"]
        self.is_gated = case.params["gate"] != "none"
        self.weight = weight(self.width, case.params["offset"], case.dtype, device)
        names = ("x", "gate") if self.is_gated else ("x",)
        self.around = Around(self.sizes, self.heads, self.rows, self.call, names)

    def rows(self, stream: int, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start:stop of a stream's `x`, `gate` or `dout`, on this workload's device."""
        return Rows(stream, self.width, self.case.dtype, self.device).rows(name, start, stop)

    def call(self, pass_: str, **tensors: torch.Tensor) -> Call:
        """The call of a pass on these rows."""
        params = self.case.params
        gate = {"activation": params["gate"]} if self.is_gated else {}
        return _KINDS[pass_, self.is_gated](
            weight=self.weight,
            eps=EPS,
            offset=float(params["offset"]),
            after_cast=params["weight"] == "after-cast",
            **tensors,
            **gate,
        )

    def fingerprint(self) -> str:
        """SHA-256 over the weight and the target's x, gate and dout."""
        tensors = self.around.tensors("backward", [(0, 0, self.around.target)])
        return joint_digest((self.weight, *tensors.values()))

    def variations(self, scenario: str) -> Iterator[Variation]:
        """The circumstances `scenario` changes; every one leaves the target's rows alone."""
        yield from SCENARIOS[scenario](self.around)

    def exams(self) -> Iterator[Exam]:
        """Both passes over some rows."""
        count = self.sizes.accuracy * self.heads
        for pass_ in ("forward", "backward"):
            fp64: Callable[[Any], Outputs] = getattr(reference, pass_)
            call = self._call_of(pass_, _EXAM, count)
            label = f"{count}x{self.width}"
            yield Exam(pass_, label, call, partial(fp64, call), partial(eager.compute, call))

    def points(self) -> Iterator[Point]:
        """Both passes, over few rows and over many."""
        for pass_ in ("forward", "backward"):
            for tokens in (*self.sizes.few, *self.sizes.many):
                count = tokens * self.heads
                yield Point(
                    pass_=pass_,
                    shape=f"{count}x{self.width}",
                    call=partial(self._call_of, pass_, _TIMED, count),
                    flops=4.0 * count * self.width,
                    bytes=self._bytes(pass_, count),
                    bound="memory",
                    launch_bound=tokens in self.sizes.few,
                )

    def _call_of(self, pass_: str, stream: int, count: int) -> Call:
        return self.call(pass_, **self.around.tensors(pass_, [(stream, 0, count)]))

    def _bytes(self, pass_: str, count: int) -> float:
        """x and y, or x, dy and dx; gate, or gate and dgate; and the weight, of which there is little."""
        rows = {
            ("forward", False): 2,
            ("forward", True): 3,
            ("backward", False): 3,
            ("backward", True): 5,
        }
        each = rows[pass_, self.is_gated] * count * self.width
        weights = self.width * (1 if pass_ == "forward" else 2)
        return float((each + weights) * self.weight.element_size())
