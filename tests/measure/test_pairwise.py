"""Differences of every pair, against the plain computation of one pair at a time."""

from __future__ import annotations

import math

import pytest
import torch

from rlbench.measure import pairwise


@pytest.mark.parametrize("elements", [1, pairwise.CHUNK, 2 * pairwise.CHUNK + 3])
def test_every_pair_is_as_computed_alone(elements: int) -> None:
    torch.manual_seed(0)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    tensors = [torch.randn(elements, dtype=torch.float64).to(d).reshape(-1, 1) for d in dtypes]
    largest, mean = pairwise.differences(tensors)
    for i, one in enumerate(tensors):
        for j, other in enumerate(tensors):
            apart = (one.double() - other.double()).abs()
            assert float(largest[i, j]) == float(apart.max())
            assert float(mean[i, j]) == pytest.approx(float(apart.mean()), rel=1e-12, abs=0)


def test_differences_too_small_for_fp32_count() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    largest, mean = pairwise.differences([one, one + 2**-40])
    assert float(largest[0, 1]) == float(mean[1, 0]) == 2**-40


def test_nan_stays_nan_for_its_pairs_only() -> None:
    clean, nan = torch.zeros(pairwise.CHUNK + 1), torch.zeros(pairwise.CHUNK + 1)
    nan[0] = float("nan")
    largest, mean = pairwise.differences([clean, nan, clean + 1])
    assert math.isnan(largest[0, 1]) and math.isnan(mean[1, 2])
    assert float(largest[0, 2]) == float(mean[0, 2]) == 1.0


def test_infinities() -> None:
    inf = torch.tensor([float("inf")])
    largest, _ = pairwise.differences([torch.zeros(1), inf, -inf, inf])
    assert float(largest[0, 1]) == float(largest[1, 2]) == math.inf
    assert math.isnan(largest[1, 3])
