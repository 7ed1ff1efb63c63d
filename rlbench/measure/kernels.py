"""The names of the device kernels a launch runs: what an engine really resolved to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

LONGEST_NAME = 200


def names(run: Callable[[], object], device: str) -> list[str]:
    """Names of the CUDA kernels of one `run`, in order of first use; empty on the CPU.

    Names beyond 200 characters (template arguments) are cut. A profiler that cannot start gives
    an empty list: it is provenance, never a verdict.
    """
    if not device.startswith("cuda"):
        return []
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
    except RuntimeError:
        return []
    kernels = [
        event.name
        for event in profile.events()
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset", "Activity Buffer"))
    ]
    return [name[:LONGEST_NAME] for name in dict.fromkeys(kernels)]
