"""How long does one call take on the device, and how much of this card's ceiling is that?"""

from __future__ import annotations

from typing import Any

from rlbench.errors import Unsupported
from rlbench.ops._op import Point
from rlbench.scenarios._scenario import Context, Scenario

SHORT = 100
"""Characters of torch's message that name the size; the rest is advice."""


def measure(context: Context) -> dict[str, Any]:
    """`points`, one a shape, and `skipped` shapes: not offered, or too large for the memory.

    Raises torch.OutOfMemoryError if that is why there is no point at all.
    """
    import torch

    from rlbench.measure import kernels, timing

    points: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    too_large: torch.OutOfMemoryError | None = None
    ceilings = context.ceilings()
    for point in context.workload.points():
        if point.pass_ not in context.passes:
            continue
        context.tell(f"{point.pass_} {point.shape}")
        try:
            run = context.kernel.bind(point.call())
            sample = timing.measure(run, context.device, graph=point.launch_bound)
        except Unsupported as why:
            skipped.append({"variation": f"{point.pass_} {point.shape}", "reason": str(why)})
            continue
        except torch.OutOfMemoryError as why:
            too_large = why
            reason = f"out of memory: {str(why).splitlines()[0][:SHORT]}"
            skipped.append({"variation": f"{point.pass_} {point.shape}", "reason": reason})
            continue
        points.append(
            {
                "pass": point.pass_,
                "shape": point.shape,
                **sample,
                **rate(point, sample["median_us"], ceilings),
                "kernels": kernels.names(run, context.device),
            }
        )
    if not points and too_large:
        raise too_large
    if not points:
        raise Unsupported("; ".join(dict.fromkeys(s["reason"] for s in skipped)) or "no shape")
    return {"points": points, "skipped": skipped}


def rate(point: Point, median_us: float, ceilings: dict[str, float]) -> dict[str, float]:
    """Achieved TFLOP/s or GB/s, and its percentage of the ceiling measured on this device."""
    if point.bound == "memory":
        name, achieved = "gbps", point.bytes / median_us * 1e-3
    else:
        name, achieved = "tflops", point.flops / median_us * 1e-6
    return {name: achieved, "percent_of_ceiling": 100 * achieved / ceilings[name]}


SCENARIO = Scenario(
    "How long does a call take on the device, and how near is that to this card's ceiling?",
    "latency",
    measure,
)
