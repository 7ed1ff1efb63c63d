"""The norm's meaning, its inputs, and that its variations leave the question alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rlbench.measure.bits import digest
from rlbench.ops._op import PRESETS, Call, Case, Kernel, Outputs, Run, Variation
from rlbench.ops.norm import OP, eager, reference
from rlbench.ops.norm.calls import GatedRmsNorm, GatedRmsNormBackward, RmsNorm, RmsNormBackward
from rlbench.ops.norm.inputs import Rows, weight
from rlbench.ops.norm.workload import NormWorkload
from rlbench.results.vocabulary import Property
from rlbench.scenarios._invariance import run_trial

PLAIN: dict[str, Any] = {"width": 24, "heads": 1, "offset": 0, "weight": "fp32", "gate": "none"}
CASES = {
    "plain": PLAIN,
    "zero-centred": {**PLAIN, "offset": 1},
    "after-cast": {**PLAIN, "weight": "after-cast"},
    "silu": {**PLAIN, "heads": 3, "gate": "silu"},
    "sigmoid": {**PLAIN, "heads": 2, "gate": "sigmoid", "offset": 1},
}
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}


def workload(name: str = "plain", dtype: str = "bf16", preset: str = "smoke") -> NormWorkload:
    return NormWorkload(Case(name, dtype, CASES[name]), preset, "cpu")


def made(name: str, pass_: str, dtype: str = "bf16", rows: int = 12) -> Any:
    load = workload(name, dtype)
    return load.call(pass_, **load.around.tensors(pass_, [(0, 0, rows)]))


def by_autograd(call: RmsNorm) -> Outputs:
    """fp64, from the one line of the definition."""
    x, w = call.x.double().requires_grad_(), call.weight.double().requires_grad_()
    leaves = [x, w]
    y = x / (x.pow(2).mean(1, keepdim=True) + call.eps) ** 0.5 * (call.offset + w)
    if isinstance(call, GatedRmsNorm):
        gate = call.gate.double().requires_grad_()
        leaves.append(gate)
        y = y * {"silu": gate * gate.sigmoid(), "sigmoid": gate.sigmoid()}[call.activation]
    if not isinstance(call, (RmsNormBackward, GatedRmsNormBackward)):
        return {"y": y.detach()}
    found = torch.autograd.grad(y, leaves, call.dout.double())
    return dict(zip(("dx", "dweight", "dgate"), found, strict=False))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_reference_is_the_definition(name: str, pass_: str) -> None:
    call = made(name, pass_)
    found = {"forward": reference.forward, "backward": reference.backward}[pass_](call)
    expected = by_autograd(call)
    assert found.keys() == expected.keys() == call.output_shapes.keys()
    for tensor, value in expected.items():
        torch.testing.assert_close(found[tensor], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", OP.dtypes)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_plain_torch_is_the_reference_but_for_rounding(name: str, pass_: str, dtype: str) -> None:
    call = made(name, pass_, dtype)
    found = eager.compute(call)
    for tensor, value in by_autograd(call).items():
        assert found[tensor].dtype == call.x.dtype
        error = (found[tensor].double() - value).norm() / value.norm()
        assert float(error) < 4 * UNIT[dtype], tensor


def test_offset_is_added_in_fp32() -> None:
    call = made("zero-centred", "forward")
    folded = (call.weight + 1).to(call.x.dtype)
    assert not torch.equal(folded.float(), call.weight.float() + 1)
    rest = {"eps": call.eps, "after_cast": False}
    there = eager.rms_norm(call.x, call.weight, offset=1.0, **rest)
    assert not torch.equal(there, eager.rms_norm(call.x, folded, offset=0.0, **rest))


def test_no_offset_is_none_at_all() -> None:
    x = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    minus = torch.tensor([-0.0, 1.0], dtype=torch.bfloat16)
    y = eager.rms_norm(x, minus, eps=1e-6, offset=0.0, after_cast=False)
    assert torch.signbit(y).tolist() == [[True, False]]


def test_conventions_differ_in_about_a_third_of_the_elements() -> None:
    x = Rows(0, 512, "bf16", "cpu").rows("x", 0, 64)
    w = weight(512, 0, "bf16", "cpu")
    one, other = (
        eager.rms_norm(x, w, eps=1e-6, offset=0.0, after_cast=cast) for cast in (False, True)
    )
    assert 0.2 < float((one != other).float().mean()) < 0.5


def test_rows_do_not_depend_on_what_they_are_asked_for_with() -> None:
    rows = Rows(3, 40, "fp16", "cpu")
    assert torch.equal(rows.rows("x", 5, 9), rows.rows("x", 0, 20)[5:9])
    assert not torch.equal(rows.rows("x", 0, 5), rows.rows("gate", 0, 5))


@pytest.mark.parametrize(
    ("name", "sha"),
    [
        ("tiny", "68ab3eca2ea56663"),
        ("tiny-zero-centred", "ddca70b7b17d863e"),
        ("tiny-gated", "df470e2a5f1116f5"),
    ],
)
def test_inputs_are_the_same_bits_everywhere(name: str, sha: str) -> None:
    assert NormWorkload(OP.case(name, "bf16"), "default", "cpu").fingerprint()[:16] == sha


# --- variations ------------------------------------------------------------------------------------


def words(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, width] -> [rows] integers that depend on every bit and its place."""
    flat = tensor.contiguous().view(torch.int16).long()
    return (flat * torch.arange(1, flat.shape[1] + 1)).sum(1)


def ideal(call: Any) -> Run:
    """Its answer for a row is made of exact integers over the row alone; dweight's over all rows."""

    def run() -> Outputs:
        own = words(call.x)
        for name in ("gate", "dout"):
            if hasattr(call, name):
                own = 3 * own + words(getattr(call, name))
        rows = own[:, None].expand(-1, call.x.shape[1])
        every = own.sum().expand(call.x.shape[1])
        return {name: every if name == "dweight" else rows for name in call.output_shapes}

    return run


IDEAL = Kernel(dict.fromkeys(("forward", "gated-forward", "backward", "gated-backward"), ideal))
SIZES = [("tiny", "default"), ("plain", "smoke"), ("silu", "smoke")]


def variations(name: str, preset: str, scenario: str) -> list[Variation]:
    params = CASES[name] if name in CASES else OP.models[name]
    return list(NormWorkload(Case(name, "bf16", params), preset, "cpu").variations(scenario))


@pytest.mark.parametrize("scenario", ["batch", "backward"])
@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_variations_leave_the_question_alone(name: str, preset: str, scenario: str) -> None:
    for variation in variations(name, preset, scenario):
        expected, actual = (run_trial(IDEAL, t) for t in (variation.expected, variation.actual))
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[k], actual[k]) for k in expected), variation.name


def circumstances(calls: list[Call]) -> list[Any]:
    """What an engine may see of them but for the target's own rows."""
    return [(call.sizes, digest(call.x)) for call in calls]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_batches_change_a_circumstance(name: str, preset: str) -> None:
    seen = []
    for variation in variations(name, preset, "batch"):
        expected, actual = (
            circumstances([part.call for part in trial.parts()])
            for trial in (variation.expected, variation.actual)
        )
        assert expected != actual, variation.name
        seen.append(actual)
    passes = len(seen) // 2
    for half in (seen[:passes], seen[passes:]):
        assert all(circumstance not in half[:i] for i, circumstance in enumerate(half))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", OP.models)
def test_names_are_keys(name: str, preset: str) -> None:
    for scenario in ("batch", "backward"):
        load = NormWorkload(Case(name, "bf16", {**OP.models[name], "width": 8}), preset, "cpu")
        names = [v.name for v in load.variations(scenario)]
        assert len(set(names)) == len(names) > 0


def test_target_stands_everywhere_and_alone_is_proven_by_rows() -> None:
    names = [v.name for v in variations("plain", "smoke", "batch") if v.pass_ == "forward"]
    assert {"first", "last", "in the middle"} <= {n.split(" of ")[0] for n in names}
    assert any(n.startswith("row by row") for n in names)
    apart = [v for v in variations("plain", "smoke", "batch") if "apart" in v.name]
    assert {v.property for v in apart} == {Property.LAYOUT_INVARIANT}


def test_rows_apart_have_nothing_but_nan_between_them() -> None:
    load = workload()
    tensors = load.around.tensors("backward", [(0, 0, 4)], apart=8)
    for tensor in tensors.values():
        assert tensor.stride() == (24 + 8, 1)
        between = tensor.as_strided((4, 8), (32, 1), 24)
        assert bool(between.isnan().all())


def test_repeats_are_of_everything_and_one_is_elsewhere() -> None:
    found = variations("silu", "smoke", "backward")
    assert {v.property for v in found} == {Property.BACKWARD_DETERMINISTIC}
    assert sum(v.actual.fresh_process for v in found) == 2
    taken = run_trial(IDEAL, found[0].actual)
    assert taken.keys() == {"dx", "dweight", "dgate"}


# --- exams and points ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_exams_are_of_both_passes(name: str) -> None:
    exams = list(workload(name).exams())
    assert [exam.pass_ for exam in exams] == ["forward", "backward"]
    for exam in exams:
        ref, plain = exam.reference(), exam.plain()
        assert ref.keys() == plain.keys() == exam.call.output_shapes.keys()
        assert {k: tuple(v.shape) for k, v in ref.items()} == dict(exam.call.output_shapes)


@pytest.mark.parametrize(("name", "forward", "backward"), [("plain", 2, 3), ("silu", 3, 5)])
def test_points_count_every_tensor_once(name: str, forward: int, backward: int) -> None:
    load = workload(name)
    for point in load.points():
        call: Any = point.call()
        rows, width = call.x.shape
        assert point.shape == f"{rows}x{width}"
        each, weights = (forward, 1) if point.pass_ == "forward" else (backward, 2)
        assert point.bytes == 2 * width * (each * rows + weights)
        assert point.bound == "memory"
    assert {point.launch_bound for point in load.points()} == {True, False}


def test_calls_say_what_they_are() -> None:
    call = made("silu", "backward", rows=6)
    assert call.sizes == {"rows": 6, "width": 24, "row_stride": 24}
    assert dataclasses.asdict(call)["activation"] == "silu"
    assert call.offset == 0.0
    assert not call.after_cast
    assert made("after-cast", "forward").after_cast
