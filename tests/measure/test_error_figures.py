"""Error figures, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlbench.measure import errors

FIGURES = ["max_abs", "mean_abs", "rel_rms", "ulp_p50", "ulp_p99", "ulp_max", "ratio_to_torch"]


def test_figures_are_those_worked_out_by_hand() -> None:
    ref = torch.tensor([1.0, 2.0, -4.0, 0.0], dtype=torch.float64)
    # bfloat16 steps by 2^-7 above 1 and 2^-6 above 2: one and two steps away.
    out = torch.tensor([1 + 2**-7, 2 + 2**-5, -4.0, 0.0], dtype=torch.bfloat16)
    plain = torch.tensor([1 + 2**-6, 2 + 2**-4, -4.0, 0.0], dtype=torch.bfloat16)
    found = errors.measure({"out": out}, {"out": ref}, {"out": plain})["out"]
    assert found["max_abs"] == 2**-5
    assert found["mean_abs"] == (2**-7 + 2**-5) / 4
    assert found["rel_rms"] == pytest.approx(math.sqrt(2**-14 + 2**-10) / math.sqrt(21), rel=1e-14)
    assert found["ratio_to_torch"] == pytest.approx(0.5, rel=1e-14)
    assert (found["ulp_p50"], found["ulp_p99"], found["ulp_max"]) == (0, 1, 2)
    assert found["nonfinite"] == 0


def test_ulp_is_counted_from_the_reference_rounded_to_the_dtype() -> None:
    ref = torch.tensor([1 + 2**-9], dtype=torch.float64)
    out = torch.ones(1, dtype=torch.bfloat16)
    found = errors.measure({"o": out}, {"o": ref}, {"o": out})["o"]
    assert found["ulp_max"] == 0
    assert found["max_abs"] == 2**-9
    assert found["ratio_to_torch"] == 1.0


def test_percentiles_are_elements_of_the_sorted_distances() -> None:
    steps = torch.arange(200)
    ref = torch.ones(200, dtype=torch.float64)
    out = (torch.full((200,), 0x3C00, dtype=torch.int32) + steps).to(torch.int16)
    found = errors.measure(
        {"o": out.view(torch.float16)}, {"o": ref}, {"o": torch.ones(200).half()}
    )["o"]
    assert (found["ulp_p50"], found["ulp_p99"], found["ulp_max"]) == (99, 197, 199)
    assert found["ratio_to_torch"] is None, "plain torch has no error to divide by"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_output_has_a_count_and_no_figures(bad: float) -> None:
    ref = torch.ones(3, dtype=torch.float64)
    out = torch.tensor([1.0, bad, bad])
    found = errors.measure({"o": out}, {"o": ref}, {"o": torch.ones(3)})["o"]
    assert found["nonfinite"] == 2
    assert [found[name] for name in FIGURES] == [None] * 7


def test_every_reference_tensor_is_measured_and_named() -> None:
    ref = {"dq": torch.ones(2, dtype=torch.float64), "dk": torch.ones(2, dtype=torch.float64)}
    same = {name: tensor.float() for name, tensor in ref.items()}
    assert list(errors.measure(same, ref, same)) == ["dq", "dk"]


def test_output_of_another_shape_is_an_error_that_says_both() -> None:
    ref, out = torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"\[3, 2\].*\[2, 3\]"):
        errors.measure({"o": out}, {"o": ref}, {"o": out})


def test_zero_reference_gives_no_figure_that_strict_json_refuses() -> None:
    ref = torch.zeros(3, dtype=torch.float64)
    out = torch.ones(3)
    found = errors.measure({"o": out}, {"o": ref}, {"o": out})["o"]
    assert all(v is None or math.isfinite(v) for v in found.values())


def test_nonfinite_plain_torch_gives_no_ratio() -> None:
    ref = torch.ones(3, dtype=torch.float64)
    plain = torch.tensor([1.0, math.nan, 1.0])
    found = errors.measure({"o": torch.ones(3)}, {"o": ref}, {"o": plain})["o"]
    assert found["ratio_to_torch"] is None
    assert found["max_abs"] == 0
