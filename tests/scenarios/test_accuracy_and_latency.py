"""Accuracy and latency runners: what is measured, what is skipped, and the rate's arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from rlbench import discover
from rlbench.errors import Unsupported
from rlbench.measure import timing
from rlbench.measure.bits import digest
from rlbench.ops._op import Exam, Kernel, Outputs, Point, Run, Variation
from rlbench.scenarios import accuracy, latency
from rlbench.scenarios._scenario import Context


@dataclass(frozen=True)
class Forward:
    entry: ClassVar[str] = "forward"
    output_shapes: ClassVar[dict[str, tuple[int, ...]]] = {"out": (2,)}
    sizes: ClassVar[dict[str, int]] = {}


@dataclass(frozen=True)
class Backward:
    entry: ClassVar[str] = "backward"
    output_shapes: ClassVar[dict[str, tuple[int, ...]]] = {"out": (2,)}
    sizes: ClassVar[dict[str, int]] = {}


class Workload:
    def __init__(self, exams: Sequence[Exam] = (), points: Sequence[Point] = ()) -> None:
        self._exams, self._points = exams, points

    def fingerprint(self) -> str:
        raise NotImplementedError

    def variations(self, scenario: str) -> Iterator[Variation]:
        raise NotImplementedError

    def exams(self) -> Iterator[Exam]:
        return iter(self._exams)

    def points(self) -> Iterator[Point]:
        return iter(self._points)


OUT = torch.tensor([1.5, 2.0])


def forward_only(call: Forward) -> Run:
    return lambda: {"out": OUT.clone()}


FORWARD_ONLY = Kernel({"forward": forward_only}, unsupported={"backward": "is forward only"})


def context(work: Workload, kernel: Kernel = FORWARD_ONLY, passes: str = "ab") -> Context:
    return Context(
        workload=work,
        kernel=kernel,
        passes=tuple(passes),
        device="cpu",
        elsewhere=lambda _: {},
        ceilings=lambda: {"tflops": 2.0, "gbps": 50.0},
        tell=lambda _: None,
    )


def exam(pass_: str, call: Forward | Backward, asked: list[str] | None = None) -> Exam:
    def reference() -> Outputs:
        if asked is not None:
            asked.append(pass_)
        return {"out": torch.tensor([1.0, 2.0], dtype=torch.float64)}

    return Exam(pass_, "3+4", call, reference, lambda: {"out": torch.tensor([2.0, 2.0])})


def test_accuracy_has_the_figures_and_the_digest_of_every_tensor() -> None:
    found = accuracy.measure(context(Workload([exam("a", Forward())])))
    assert list(found["errors"]) == ["a.out 3+4"]
    assert found["errors"]["a.out 3+4"]["max_abs"] == 0.5
    assert found["errors"]["a.out 3+4"]["ratio_to_torch"] == pytest.approx(0.5)
    assert found["digests"] == {"a.out 3+4": digest(OUT)}
    assert found["skipped"] == []


def test_accuracy_keeps_every_tensor_under_its_digests_name() -> None:
    kept: dict[str, torch.Tensor] = {}
    asked = context(Workload([exam("a", Forward())]))
    found = accuracy.measure(dataclasses.replace(asked, keep=kept.__setitem__))
    assert {name: digest(tensor) for name, tensor in kept.items()} == found["digests"]


def test_accuracy_skips_passes_that_are_not_offered_before_computing_their_reference() -> None:
    asked: list[str] = []
    work = Workload([exam("a", Forward(), asked), exam("b", Backward(), asked)])
    found = accuracy.measure(context(work))
    assert found["skipped"] == [{"variation": "b 3+4", "reason": "is forward only"}]
    assert asked == ["a"]


def test_accuracy_of_nothing_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="is forward only"):
        accuracy.measure(context(Workload([exam("b", Backward())])))
    with pytest.raises(Unsupported, match="no pass"):
        accuracy.measure(context(Workload([exam("a", Forward())]), passes="c"))


def point(pass_: str = "a", *, backward: bool = False, bound: str = "compute") -> Point:
    def call() -> Forward | Backward:
        return Backward() if backward else Forward()

    return Point(pass_, "1x8", call, flops=3e9, bytes=5e6, bound=bound)


def test_latency_has_one_point_a_shape_with_the_rate_against_its_ceiling() -> None:
    found = latency.measure(context(Workload(points=[point(), point(bound="memory")])))
    compute, memory = found["points"]
    assert (compute["pass"], compute["shape"], compute["timer"]) == ("a", "1x8", "wall-clock")
    assert compute["kernels"] == []
    seconds = compute["median_us"] * 1e-6
    assert compute["tflops"] == pytest.approx(3e9 / seconds / 1e12)
    assert compute["percent_of_ceiling"] == pytest.approx(100 * compute["tflops"] / 2.0)
    assert "gbps" not in compute
    seconds = memory["median_us"] * 1e-6
    assert memory["gbps"] == pytest.approx(5e6 / seconds / 1e9)
    assert memory["percent_of_ceiling"] == pytest.approx(100 * memory["gbps"] / 50.0)
    assert "tflops" not in memory


def test_rate_arithmetic() -> None:
    ceilings = {"tflops": 2.0, "gbps": 50.0}
    assert latency.rate(point(), 3000.0, ceilings) == {
        "tflops": pytest.approx(1.0),
        "percent_of_ceiling": pytest.approx(50.0),
    }
    assert latency.rate(point(bound="memory"), 200.0, ceilings) == {
        "gbps": pytest.approx(25.0),
        "percent_of_ceiling": pytest.approx(50.0),
    }


def test_latency_skips_what_is_not_offered_and_other_passes() -> None:
    work = Workload(points=[point(), point("b", backward=True), point("c")])
    found = latency.measure(context(work))
    assert [p["pass"] for p in found["points"]] == ["a"]
    assert found["skipped"] == [{"variation": "b 1x8", "reason": "is forward only"}]
    with pytest.raises(Unsupported, match="is forward only"):
        latency.measure(context(Workload(points=[point("b", backward=True)])))
    with pytest.raises(Unsupported, match="no shape"):
        latency.measure(context(Workload(points=[point("c")])))


def test_a_shape_too_large_for_the_memory_costs_that_shape_only() -> None:
    def too_large(call: Backward) -> Run:
        raise torch.OutOfMemoryError("Tried to allocate 256.50 GiB.\nadvice")

    kernel = Kernel({"forward": forward_only, "backward": too_large})
    large = point("b", backward=True)
    found = latency.measure(context(Workload(points=[large, point()]), kernel))
    assert [p["pass"] for p in found["points"]] == ["a"]
    reason = "out of memory: Tried to allocate 256.50 GiB."
    assert found["skipped"] == [{"variation": "b 1x8", "reason": reason}]
    with pytest.raises(torch.OutOfMemoryError):
        latency.measure(context(Workload(points=[large]), kernel))


def test_launch_bound_points_ask_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def measure(run: object, device: str, *, graph: bool) -> dict[str, float]:
        asked.append(graph)
        return {"median_us": 1.0}

    monkeypatch.setattr(timing, "measure", measure)
    bound = Point("a", "s", Forward, flops=1.0, bytes=1.0, bound="memory", launch_bound=True)
    latency.measure(context(Workload(points=[point(), bound])))
    assert asked == [False, True]


def test_scenarios_are_the_six_of_the_design_each_with_its_kind() -> None:
    assert {name: s.kind for name, s in discover.scenarios().items()} == {
        "accuracy": "accuracy",
        "backward": "invariance",
        "batch": "invariance",
        "chunked-prefill": "invariance",
        "decode": "invariance",
        "latency": "latency",
    }
    assert all(s.question.endswith("?") for s in discover.scenarios().values())
