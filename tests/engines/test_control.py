"""The control fails every check of every invariance scenario, always with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from rlbench import discover
from rlbench.engines import _control_attention, control
from rlbench.engines._engine import PROCESS_NUMBER
from rlbench.measure import errors
from rlbench.ops._op import Case, Kernel, Outputs
from rlbench.ops.attention import OP
from rlbench.ops.attention.workload import AttentionWorkload
from rlbench.scenarios._invariance import measure, run_trial
from rlbench.scenarios._scenario import Context

INVARIANCE = ("batch", "chunked-prefill", "decode", "backward")
TINY = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
NARROW = {"q_heads": 2, "kv_heads": 1, "head_dim": 64}
# What a CPU can do: the tiny case in its two sizes, and `smoke` with few heads.
WORKLOADS: list[tuple[str, Mapping[str, int], str]] = [
    ("tiny", TINY, "default"),
    ("narrow", NARROW, "smoke"),
]


def loaded(monkeypatch: pytest.MonkeyPatch, process: int = 0) -> Kernel:
    monkeypatch.setenv(PROCESS_NUMBER, str(process))
    return control.load_attention({}, "cpu")


def answer(
    monkeypatch: pytest.MonkeyPatch, scenario: str, load: AttentionWorkload
) -> dict[str, Any]:
    """The scenario's fields, with the other process played by a second instance."""

    def elsewhere(name: str) -> Outputs:
        twin = loaded(monkeypatch, process=1)
        (variation,) = [v for v in load.variations(scenario) if v.name == name]
        return run_trial(twin, variation.actual)

    context = Context(
        workload=load,
        kernel=loaded(monkeypatch),
        passes=("prefill", "decode", "backward"),
        device="cpu",
        elsewhere=elsewhere,
        ceilings=dict,
        tell=lambda _: None,
    )
    return measure(scenario, context)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("name", "shape", "preset"), WORKLOADS)
@pytest.mark.parametrize("scenario", INVARIANCE)
def test_control_fails_every_check(
    name: str,
    shape: Mapping[str, int],
    preset: str,
    scenario: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = AttentionWorkload(Case(name, dtype, shape), preset, "cpu")
    found = answer(monkeypatch, scenario, load)
    assert found["skipped"] == []
    assert [c["variation"] for c in found["checks"] if c["equal"]] == []
    assert [c["variation"] for c in found["checks"]] == [v.name for v in load.variations(scenario)]
    assert {c["nans"] for c in found["checks"]} == {0}


@pytest.mark.parametrize("scenario", INVARIANCE)
def test_control_gives_the_same_bits_in_every_run(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AttentionWorkload(Case("tiny", "bf16", TINY), "default", "cpu")
    first, second = (answer(monkeypatch, scenario, load) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_control_is_wrong_in_its_last_bits_only(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = AttentionWorkload(Case("tiny", dtype, TINY), "default", "cpu")
    kernel = loaded(monkeypatch)
    for exam in load.exams():
        outputs = kernel.bind(exam.call)()
        for name, figures in errors.measure(outputs, exam.reference(), exam.plain()).items():
            assert figures["nonfinite"] == 0
            assert figures["ratio_to_torch"] < 8, f"{exam.pass_} {name}"


def test_pieces_cover_the_keys_once_and_follow_the_circumstance() -> None:
    for k_len in (1, 7, 8, 9, 150, 1000):
        pieces = _control_attention.split_keys(k_len, 12345)
        assert [i for p in pieces for i in range(p.start, p.stop)] == list(range(k_len))
    cuts = {
        tuple((p.start, p.stop) for p in _control_attention.split_keys(300, c)) for c in range(99)
    }
    assert len(cuts) > 90


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("case", "preset"),
    [
        ("tiny", "default"),
        ("qwen3-next-tp4", "smoke"),
        ("llama3-70b-tp8", "smoke"),
    ],
)
def test_control_fails_the_early_steps_of_real_shapes(
    case: str, preset: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 41 keys: few borders, so that two circumstances may cut alike."""
    load = OP.load(OP.case(case, dtype), preset, "cpu")
    early = next(load.variations("decode"))
    assert early.name.startswith("early steps")
    kernel = loaded(monkeypatch)
    one, other = run_trial(kernel, early.expected), run_trial(kernel, early.actual)
    assert not torch.equal(one["out"], other["out"])


def test_padding_alone_changes_the_controls_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding rows themselves are never read; the row count is the circumstance."""
    load = AttentionWorkload(Case("tiny", "bf16", TINY), "default", "cpu")
    (padded,) = [v for v in load.variations("batch") if "padding" in v.name]
    kernel = loaded(monkeypatch)
    one, other = run_trial(kernel, padded.expected), run_trial(kernel, padded.actual)
    assert one["out"].shape == other["out"].shape
    assert not torch.equal(one["out"], other["out"])


def test_two_processes_count_their_backwards_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = AttentionWorkload(Case("tiny", "bf16", TINY), "default", "cpu")
    trial = next(load.variations("backward")).expected
    here = run_trial(loaded(monkeypatch), trial)
    again = run_trial(loaded(monkeypatch), trial)
    there = run_trial(loaded(monkeypatch, process=1), trial)
    for name, tensor in here.items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, there[name])


def test_there_is_one_control_and_it_is_it() -> None:
    assert [i for i, v in discover.engines().items() if v.engine.is_control] == ["control"]
    assert control.ENGINE.claims == ()
