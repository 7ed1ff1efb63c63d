"""Distance of low-precision outputs from an fp64 reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rlbench.measure.bits import digest, ordinals

__all__ = ["digest", "measure"]


def measure(
    outputs: Mapping[str, torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
) -> dict[str, dict[str, Any]]:
    """The error figures of every reference tensor.

    outputs, plain: the engine's and plain torch's results at the case's dtype.
    reference: fp64 tensors of the same names and shapes.

    `max_abs` and `mean_abs` are absolute errors, `rel_rms` is ‖out - ref‖ / ‖ref‖, `ulp_*` count
    representable values of the output dtype between the output and the reference rounded to it,
    `ratio_to_torch` is `rel_rms` over plain torch's. With any non-finite output the error figures
    are None and `nonfinite` says how many there are.
    """
    return {name: _figures(outputs[name], ref, plain[name]) for name, ref in reference.items()}


def _figures(out: torch.Tensor, ref: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
    if out.shape != ref.shape:
        raise ValueError(f"output shape {list(out.shape)}, the reference has {list(ref.shape)}")
    nonfinite = int((~torch.isfinite(out)).sum())
    if nonfinite:
        empty = dict.fromkeys(
            ("max_abs", "mean_abs", "rel_rms", "ulp_p50", "ulp_p99", "ulp_max", "ratio_to_torch")
        )
        return {**empty, "nonfinite": nonfinite}
    error = (out.double() - ref).abs()
    rel_rms = _relative_rms(out, ref)
    plain_rms = _relative_rms(plain, ref)
    ulp = (ordinals(out) - ordinals(ref.to(out.dtype))).abs().reshape(-1).sort().values
    return {
        "max_abs": float(error.max()),
        "mean_abs": float(error.mean()),
        "rel_rms": rel_rms,
        "ulp_p50": int(ulp[(ulp.numel() - 1) // 2]),
        "ulp_p99": int(ulp[(ulp.numel() - 1) * 99 // 100]),
        "ulp_max": int(ulp[-1]),
        "ratio_to_torch": rel_rms / plain_rms if rel_rms is not None and plain_rms else None,
        "nonfinite": 0,
    }


def _relative_rms(out: torch.Tensor, ref: torch.Tensor) -> float | None:
    """None where it would not be a number: the reference is zero, or an output is not finite."""
    value = float((out.double() - ref).norm() / ref.norm())
    return value if math.isfinite(value) else None
