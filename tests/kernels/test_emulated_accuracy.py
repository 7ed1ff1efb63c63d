"""The definition is as near fp64 as rounding weights and results to the tensors' dtype allows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core to plan: pip install 'rlbench[kernels]'")

from emulation.builds import skip_where_it_cannot_run
from emulation.launches import generic_result
from emulation.problems import Case, problem_of, reference

skip_where_it_cannot_run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_two_roundings(dtype: torch.dtype) -> None:
    case = Case(64, dtype, None, 4, 1, ((128, 900),), causal=True)
    exact = reference(problem_of(case)).out
    limit = rms(rounded_twice(case, dtype) - exact)
    assert rms(generic_result(case).out.double() - exact) < 1.03 * limit


def rounded_twice(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Attention in fp64 but for weights, relative to their row's largest, and the result."""
    problem = problem_of(case)
    q, k, v = (tensor.double() for tensor in problem.packed)
    ((queries, keys),) = case.lengths
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * problem.request.softmax_scale
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = weights.to(dtype).double() @ v[:, 0] / weights.sum(-1, keepdim=True)
    return out.transpose(0, 1).to(dtype).double()


def rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())
