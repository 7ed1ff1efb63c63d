"""Norm engines: the control is wrong in every check, torch's are right, others are asked what they document."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from test_loaders import modules

from rlbench.engines import control, flashinfer, quack, te, torch_compile, torch_eager
from rlbench.engines import torch as torch_engine
from rlbench.engines._engine import PROCESS_NUMBER
from rlbench.engines._norm import WEIGHTS, Norms, convention
from rlbench.errors import Unsupported
from rlbench.measure import errors
from rlbench.ops._op import Case, Kernel, Outputs
from rlbench.ops.norm import OP
from rlbench.ops.norm.eager import rms_norm
from rlbench.ops.norm.workload import NormWorkload
from rlbench.scenarios._invariance import measure, run_trial
from rlbench.scenarios._scenario import Context

WIDE = {"width": 256, "heads": 1, "offset": 1, "weight": "fp32", "gate": "none"}
GATED = {"width": 128, "heads": 4, "offset": 0, "weight": "after-cast", "gate": "sigmoid"}
WORKLOADS: list[tuple[str, Mapping[str, Any], str]] = [
    *((name, OP.models[name], "default") for name in OP.default_cases["cpu"]),
    ("wide", WIDE, "smoke"),
    ("gated", GATED, "smoke"),
]


def workload(name: str, params: Mapping[str, Any], dtype: str, preset: str) -> NormWorkload:
    return NormWorkload(Case(name, dtype, params), preset, "cpu")


def tiny(name: str = "tiny", dtype: str = "bf16", **changed: Any) -> NormWorkload:
    return workload(name, {**OP.models[name], **changed}, dtype, "default")


def call_of(load: NormWorkload, pass_: str = "forward", rows: int = 9) -> Any:
    return load.call(pass_, **load.around.tensors(pass_, [(0, 0, rows)]))


def answer(kernel: Kernel, twin: Kernel, scenario: str, load: NormWorkload) -> list[dict[str, Any]]:
    """The scenario's checks; another process is played by a second instance."""

    def elsewhere(name: str) -> Outputs:
        (variation,) = [v for v in load.variations(scenario) if v.name == name]
        return run_trial(twin, variation.actual)

    context = Context(
        workload=load,
        kernel=kernel,
        passes=("forward", "backward"),
        device="cpu",
        elsewhere=elsewhere,
        ceilings=dict,
        tell=lambda _: None,
    )
    checks: list[dict[str, Any]] = measure(scenario, context)["checks"]
    return checks


def wrong(monkeypatch: pytest.MonkeyPatch, process: int) -> Kernel:
    monkeypatch.setenv(PROCESS_NUMBER, str(process))
    return control.load_norm({}, "cpu")


@pytest.mark.parametrize("dtype", OP.dtypes)
@pytest.mark.parametrize(("name", "params", "preset"), WORKLOADS)
@pytest.mark.parametrize("scenario", ["batch", "backward"])
def test_control_fails_every_check(
    name: str,
    params: Mapping[str, Any],
    preset: str,
    scenario: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = workload(name, params, dtype, preset)
    checks = answer(wrong(monkeypatch, 0), wrong(monkeypatch, 1), scenario, load)
    assert [c["variation"] for c in checks if c["equal"]] == []
    assert [c["variation"] for c in checks] == [v.name for v in load.variations(scenario)]
    assert {c["nans"] for c in checks} == {0}


def test_control_gives_the_same_bits_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    load = tiny()
    runs = [
        answer(wrong(monkeypatch, 0), wrong(monkeypatch, 1), "backward", load) for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_control_is_not_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = wrong(monkeypatch, 0)
    for exam in tiny("tiny-gated").exams():
        found = errors.measure(kernel.bind(exam.call)(), exam.reference(), exam.plain())
        for figures in found.values():
            assert figures["nonfinite"] == 0
            assert figures["rel_rms"] < 0.02


@pytest.mark.parametrize("dtype", OP.dtypes)
@pytest.mark.parametrize("name", ["tiny", "tiny-zero-centred", "tiny-gated"])
@pytest.mark.parametrize("scenario", ["batch", "backward"])
def test_plain_torch_is_invariant_here(name: str, scenario: str, dtype: str) -> None:
    kernel = torch_eager.load_norm({}, "cpu")
    checks = answer(kernel, kernel, scenario, tiny(name, dtype))
    assert [c["variation"] for c in checks if not c["equal"]] == []


def test_torch_is_right_and_says_what_it_does_not_offer() -> None:
    kernel = torch_engine.load_norm({}, "cpu")
    for exam in tiny().exams():
        found = errors.measure(kernel.bind(exam.call)(), exam.reference(), exam.plain())
        assert all(0.5 < figures["ratio_to_torch"] < 2 for figures in found.values())
    assert kernel.resolved == {"weight": WEIGHTS["fp32"]}
    with pytest.raises(Unsupported, match="adds 0 to the weight; this case has 1"):
        kernel.bind(call_of(tiny("tiny-zero-centred")))
    with pytest.raises(Unsupported, match="no gated norm"):
        kernel.bind(call_of(tiny("tiny-gated")))
    with pytest.raises(
        Unsupported, match=r"fp32, before the cast.*this case has it multiplied after"
    ):
        kernel.bind(call_of(tiny(weight="after-cast")))
    kernel.bind(call_of(tiny(dtype="fp32", weight="after-cast")))  # a cast that is none


@pytest.mark.parametrize("after_cast", [False, True])
@pytest.mark.parametrize("name", ["tiny", "tiny-zero-centred", "tiny-gated"])
def test_convention_is_found_by_looking(name: str, after_cast: bool) -> None:
    call = call_of(tiny(name))
    found = convention(call, partial(rms_norm, **call.arguments, after_cast=after_cast))
    assert WEIGHTS[found] == WEIGHTS["after-cast" if after_cast else "fp32"]


def test_convention_is_that_of_the_kind() -> None:
    """Hugging Face's model code casts a plain norm first, and a zero-centred one last."""

    def norm(x: torch.Tensor, w: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
        return rms_norm(x, w, eps=eps, offset=offset, after_cast=not offset)

    kernel = Norms(norm, offsets=(0.0, 1.0)).kernel()
    kernel.bind(call_of(tiny(weight="after-cast")))
    kernel.bind(call_of(tiny("tiny-zero-centred")))
    assert kernel.resolved == {
        "weight": WEIGHTS["after-cast"],
        "weight, zero-centred": WEIGHTS["fp32"],
    }
    with pytest.raises(Unsupported):
        kernel.bind(call_of(tiny()))


def test_gated_function_gets_its_gate_and_gradients() -> None:
    def gated(x: torch.Tensor, w: torch.Tensor, gate: torch.Tensor, **rest: Any) -> torch.Tensor:
        return rms_norm(x, w, gate, after_cast=False, **rest)

    kernel = Norms(rms_norm, gated).kernel()
    for exam in tiny("tiny-gated").exams():
        found = kernel.bind(exam.call)()
        assert all(torch.equal(found[name], value) for name, value in exam.plain().items())


def test_flashinfer_takes_two_kinds_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(offset: float) -> Any:
        def norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
            asked.append((offset, eps))
            return rms_norm(x, w, eps=eps, offset=offset, after_cast=False)

        return norm

    modules(monkeypatch, "flashinfer.norm", rmsnorm=fake(0.0), gemma_rmsnorm=fake(1.0))
    kernel = flashinfer.load_norm({}, "cuda:0")
    for name, offset in (("tiny", 0.0), ("tiny-zero-centred", 1.0)):
        call = call_of(tiny(name))
        found = kernel.bind(call)()["y"]
        assert asked[-1] == (offset, 1e-6)
        assert torch.equal(
            found, rms_norm(call.x, call.weight, eps=1e-6, offset=offset, after_cast=False)
        )
    with pytest.raises(Unsupported, match="bf16 and fp16"):
        kernel.bind(call_of(tiny(dtype="fp32")))
    with pytest.raises(Unsupported, match="offers no backward"):
        kernel.bind(call_of(tiny(), "backward"))


def test_quack_has_gradients_and_no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps=eps, offset=0.0, after_cast=False)

    modules(monkeypatch, "quack.rmsnorm", rmsnorm=rmsnorm)
    kernel = quack.load_norm({}, "cuda:0")
    for exam in tiny().exams():
        found = kernel.bind(exam.call)()
        assert all(torch.equal(found[name], value) for name, value in exam.plain().items())
    with pytest.raises(Unsupported, match="adds 0 to the weight; this case has 1"):
        kernel.bind(call_of(tiny("tiny-zero-centred")))


def test_te_is_told_what_the_weight_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class RMSNorm(torch.nn.Module):
        def __init__(self, width: int, eps: float, **rest: Any) -> None:
            super().__init__()
            made.append({"width": width, **rest})
            self.weight = torch.nn.Parameter(torch.zeros(width, dtype=rest["params_dtype"]))
            self.eps, self.offset = eps, float(rest["zero_centered_gamma"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rms_norm(x, self.weight, eps=self.eps, offset=self.offset, after_cast=False)

    modules(monkeypatch, "transformer_engine.pytorch", RMSNorm=RMSNorm)
    kernel = te.load_norm({}, "cpu")
    for name, centred in (("tiny", False), ("tiny-zero-centred", True)):
        call = call_of(tiny(name))
        expected = rms_norm(call.x, call.weight, eps=call.eps, offset=call.offset, after_cast=False)
        assert torch.equal(kernel.bind(call)()["y"], expected)
        assert made[-1]["zero_centered_gamma"] is centred
        assert made[-1]["params_dtype"] is torch.bfloat16
        number = len(made)
        kernel.bind(call)()
        assert len(made) == number, "one is made for all runs: it fills a weight"
    with pytest.raises(Unsupported, match="cannot be run twice"):
        kernel.bind(call_of(tiny(), "backward"))


def test_compiled_is_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compiling(function: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compiling)
    kernel = torch_compile.load_norm({}, "cuda:0")
    assert compiled == [rms_norm]
    for exam in tiny("tiny-gated").exams():
        found = kernel.bind(exam.call)()
        assert all(torch.equal(found[name], value) for name, value in exam.plain().items())


@pytest.mark.parametrize("engine", [flashinfer, te])
def test_norms_have_no_options_of_attention(engine: Any) -> None:
    assert engine.ENGINE.variants_for("norm") == ((),)
    assert engine.ENGINE.variants_for("attention") == engine.ENGINE.variants
    assert engine.ENGINE.variants_for("moe") == ()
    every = engine.ENGINE.all_variants()
    assert set(every) == {(), *engine.ENGINE.variants}
    assert len(every) == len(set(every))
