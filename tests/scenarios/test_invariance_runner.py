"""The invariance runner, with workloads and kernels made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from rlbench.errors import Unsupported
from rlbench.measure.bits import digest
from rlbench.ops._op import Exam, Kernel, Outputs, Part, Point, Run, Trial, Variation
from rlbench.results.vocabulary import Property
from rlbench.scenarios._invariance import invariance, measure, run_trial
from rlbench.scenarios._scenario import Context


@dataclass(frozen=True)
class Numbers:
    """A call whose answer is its numbers."""

    entry: ClassVar[str] = "echo"
    numbers: tuple[float, ...]
    names: tuple[str, ...] = ("out",)

    @property
    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.names, (len(self.numbers),))

    @property
    def sizes(self) -> dict[str, int]:
        return {"numbers": len(self.numbers)}


@dataclass(frozen=True)
class Other(Numbers):
    entry: ClassVar[str] = "other"


def everything(outputs: Outputs) -> Outputs:
    return outputs


def trial(*calls: Numbers, fresh: bool = False, made: list[str] | None = None) -> Trial:
    def parts() -> Iterator[Part]:
        for call in calls:
            if made is not None:
                made.append("made")
            yield Part(call, everything)

    return Trial(parts, fresh_process=fresh)


def variation(name: str, expected: Trial, actual: Trial, pass_: str = "prefill") -> Variation:
    return Variation(name, pass_, Property.BATCH_INVARIANT, expected, actual)


class Workload:
    """Asks these variations, whatever the scenario, and notes under which name it was asked."""

    def __init__(self, *variations: Variation) -> None:
        self._variations = variations
        self.asked: list[str] = []

    def fingerprint(self) -> str:
        raise NotImplementedError

    def variations(self, scenario: str) -> Iterator[Variation]:
        self.asked.append(scenario)
        return iter(self._variations)

    def exams(self) -> Iterator[Exam]:
        raise NotImplementedError

    def points(self) -> Iterator[Point]:
        raise NotImplementedError


def echo(call: Numbers) -> Run:
    return lambda: {"out": torch.tensor(call.numbers)}


def context(
    workload: Workload,
    bind: Callable[[Numbers], Run] = echo,
    passes: Sequence[str] = ("prefill",),
    elsewhere: Callable[[str], Outputs] | None = None,
    told: list[str] | None = None,
) -> Context:
    def nowhere(name: str) -> Outputs:
        raise AssertionError(f"{name} asked for another process")

    return Context(
        workload=workload,
        kernel=Kernel({"echo": bind}),
        passes=tuple(passes),
        device="cpu",
        elsewhere=elsewhere or nowhere,
        ceilings=dict,
        tell=(told if told is not None else []).append,
    )


ONE, TWO = Numbers((1.0, 2.0)), Numbers((1.0, 3.0))


def test_checks_say_what_was_varied_and_what_differed() -> None:
    told: list[str] = []
    base = trial(ONE)
    work = Workload(variation("same", base, trial(ONE)), variation("not", base, trial(TWO)))
    found = measure("batch", context(work, told=told))
    assert work.asked == ["batch"]
    assert told == ["same", "not"]
    assert [(c["variation"], c["equal"], c["differing"]) for c in found["checks"]] == [
        ("same", True, 0),
        ("not", False, 1),
    ]
    assert found["checks"][1]["first"]["index"] == [1]
    assert {c["pass"] for c in found["checks"]} == {"prefill"}
    assert {c["property"] for c in found["checks"]} == {"batch_invariant"}
    assert found["skipped"] == []
    assert found["digests"] == {"prefill.out": digest(torch.tensor(ONE.numbers))}


def test_baseline_is_computed_once_for_variations_that_follow_one_another() -> None:
    made: list[str] = []
    base = trial(ONE, made=made)
    work = Workload(*(variation(f"v{i}", base, trial(ONE)) for i in range(5)))
    assert len(measure("batch", context(work))["checks"]) == 5
    assert made == ["made"]


def test_baseline_is_computed_for_each_change() -> None:
    made_a: list[str] = []
    made_b: list[str] = []
    a, b = trial(ONE, made=made_a), trial(TWO, made=made_b)
    work = Workload(
        variation("1", a, trial(ONE)),
        variation("2", b, trial(TWO)),
        variation("3", b, trial(TWO)),
        variation("4", a, trial(ONE)),
    )
    found = measure("batch", context(work))
    assert all(check["equal"] for check in found["checks"])
    assert (len(made_a), len(made_b)) == (2, 1)
    assert found["digests"] == {"prefill.out": digest(torch.tensor(ONE.numbers))}


def test_parts_are_joined_in_their_order() -> None:
    whole = Numbers((1.0, 2.0, 3.0))
    pieces = trial(Numbers((1.0,)), Numbers((2.0, 3.0)))
    work = Workload(variation("cut", trial(whole), pieces))
    assert measure("batch", context(work))["checks"][0]["equal"]
    swapped = trial(Numbers((2.0, 3.0)), Numbers((1.0,)))
    work = Workload(variation("cut", trial(whole), swapped))
    assert not measure("batch", context(work))["checks"][0]["equal"]


def test_engine_that_reuses_its_output_buffer_cannot_pass_by_aliasing() -> None:
    buffer = torch.zeros(2)

    def reuse(call: Numbers) -> Run:
        return lambda: {"out": buffer.copy_(torch.tensor(call.numbers))}

    work = Workload(variation("not", trial(ONE), trial(TWO)))
    found = measure("batch", context(work, reuse))
    assert not found["checks"][0]["equal"]
    joined = run_trial(Kernel({"echo": reuse}), trial(ONE, TWO))
    assert joined["out"].tolist() == [1.0, 2.0, 1.0, 3.0]


def test_outputs_keep_no_graph() -> None:
    def tracked(call: Numbers) -> Run:
        return lambda: {"out": torch.tensor(call.numbers, requires_grad=True) * 1}

    assert not run_trial(Kernel({"echo": tracked}), trial(ONE))["out"].requires_grad


def test_what_the_engine_does_not_offer_is_skipped_with_its_reason() -> None:
    base = trial(ONE)
    work = Workload(
        variation("no", base, trial(Other((1.0, 2.0)))),
        variation("yes", base, trial(ONE)),
        variation("no baseline", trial(Other((1.0, 2.0))), trial(ONE)),
        variation("yes again", base, trial(ONE)),
    )
    found = measure("batch", context(work))
    assert [c["variation"] for c in found["checks"]] == ["yes", "yes again"]
    assert found["skipped"] == [
        {"variation": "no", "reason": "offers no other"},
        {"variation": "no baseline", "reason": "offers no other"},
    ]


def test_baseline_that_failed_is_not_taken_for_the_next_one() -> None:
    """After a baseline that is not offered, the one before it may not be compared against."""
    work = Workload(
        variation("a", trial(ONE), trial(ONE)),
        variation("b", trial(Other((1.0,))), trial(TWO)),
        variation("c", trial(TWO), trial(TWO)),
    )
    found = measure("batch", context(work))
    assert [(c["variation"], c["equal"]) for c in found["checks"]] == [("a", True), ("c", True)]


def test_nothing_offered_is_unsupported_with_every_reason_once() -> None:
    def refuse(call: Numbers) -> Run:
        raise Unsupported("no D 256" if call is ONE else "no chunks")

    base = trial(ONE)
    work = Workload(
        variation("a", base, trial(ONE)),
        variation("b", base, trial(ONE)),
        variation("c", trial(TWO), trial(ONE)),
    )
    with pytest.raises(Unsupported) as caught:
        measure("batch", context(work, refuse))
    assert str(caught.value) == "no D 256; no chunks"


def test_refusal_while_running_counts_like_one_while_binding() -> None:
    def late(call: Numbers) -> Run:
        def run() -> Outputs:
            raise Unsupported("no kernel for it")

        return run

    with pytest.raises(Unsupported, match="no kernel for it"):
        measure("batch", context(Workload(variation("a", trial(ONE), trial(ONE))), late))


def test_no_variation_at_all_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no variation"):
        measure("batch", context(Workload()))


def test_passes_not_asked_for_are_left_out_without_being_run() -> None:
    made: list[str] = []
    told: list[str] = []
    left_out = variation("b", trial(ONE, made=made), trial(ONE, made=made), "decode")
    work = Workload(left_out, variation("a", trial(ONE), trial(ONE)))
    found = measure("batch", context(work, told=told))
    assert [c["variation"] for c in found["checks"]] == ["a"]
    assert (made, told, found["skipped"]) == ([], ["a"], [])
    with pytest.raises(Unsupported, match="no variation"):
        measure("batch", context(Workload(left_out)))


def test_fresh_process_is_asked_by_the_variations_name() -> None:
    asked: list[str] = []

    def elsewhere(name: str) -> Outputs:
        asked.append(name)
        return {"out": torch.tensor(TWO.numbers)}

    made: list[str] = []
    work = Workload(variation("far", trial(ONE), trial(ONE, fresh=True, made=made)))
    found = measure("backward", context(work, elsewhere=elsewhere))
    assert asked == ["far"]
    assert made == ["made"], "looked at for its sizes"
    assert not found["checks"][0]["equal"], "the answer of the other process counts"


def test_check_says_which_calls_and_sizes_it_exercised() -> None:
    expected = trial(Numbers((1.0, 2.0, 3.0)))
    chunks = trial(Numbers((1.0,)), Numbers((2.0, 3.0)))
    (check,) = measure("batch", context(Workload(variation("chunks", expected, chunks))))["checks"]
    assert check["exercised"] == "2 × echo: numbers 1 to 2"


def test_every_output_tensor_has_a_digest() -> None:
    def three(call: Numbers) -> Run:
        return lambda: {n: torch.tensor(call.numbers) + i for i, n in enumerate(("dq", "dk", "dv"))}

    call = Numbers(ONE.numbers, ("dq", "dk", "dv"))
    work = Workload(variation("a", trial(call), trial(call), "backward"))
    found = measure("backward", context(work, three, ["backward"]))
    assert list(found["digests"]) == ["backward.dq", "backward.dk", "backward.dv"]
    assert found["checks"][0]["elements"] == 6


def test_nan_is_reported_even_where_bits_are_equal() -> None:
    nan = Numbers((1.0, float("nan")))
    found = measure("batch", context(Workload(variation("a", trial(nan), trial(nan)))))
    assert (found["checks"][0]["equal"], found["checks"][0]["nans"]) == (True, 1)


def test_error_of_an_engine_is_not_swallowed() -> None:
    def broken(call: Numbers) -> Run:
        raise RuntimeError("device-side assert")

    with pytest.raises(RuntimeError, match="device-side assert"):
        measure("batch", context(Workload(variation("a", trial(ONE), trial(ONE))), broken))


def test_scenario_asks_for_the_variations_of_its_name() -> None:
    work = Workload(variation("a", trial(ONE), trial(ONE)))
    scenario = invariance("chunked-prefill", "Is it?")
    found: dict[str, Any] = scenario.measure(context(work))
    assert work.asked == ["chunked-prefill"]
    assert (scenario.kind, scenario.question) == ("invariance", "Is it?")
    assert len(found["checks"]) == 1


@pytest.mark.parametrize("answer", [{}, {"other": torch.ones(2)}, {"out": torch.ones(3)}])
def test_answer_that_lacks_an_output_or_its_shape_cannot_pass(answer: Outputs) -> None:
    def silent(_: Numbers) -> Run:
        return lambda: answer

    call = Numbers((1.0, 2.0))
    with pytest.raises(ValueError, match="should have shape"):
        measure("batch", context(Workload(variation("a", trial(call), trial(call))), silent))
