"""The device: what it is, and what it can do right now."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch

from rlbench.measure.timing import seconds

PROBE_REPEATS = 25


def describe(device: str) -> dict[str, Any]:
    """`name`, `compute_capability`, `sms`, `memory` (bytes), `driver`, `cuda` of a device."""
    if not device.startswith("cuda"):
        return {
            "name": _cpu_name(),
            "compute_capability": None,
            "sms": None,
            "memory": None,
            "driver": None,
            "cuda": None,
        }
    properties = torch.cuda.get_device_properties(torch.device(device))
    return {
        "name": properties.name,
        "compute_capability": [properties.major, properties.minor],
        "sms": properties.multi_processor_count,
        "memory": properties.total_memory,
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "CPU"


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout else None


def probe(device: str) -> dict[str, float]:
    """This device's ceilings, measured now: `tflops` of a bf16 product, `gbps` of a copy.

    CUDA: 8192 x 8192 x 8192 and 1 GiB (bytes read plus bytes written). CPU: 1024 cubed in fp32
    and 64 MiB. Random data, timed launch by launch as the engines are.
    """
    cuda = device.startswith("cuda")
    n, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    out = torch.empty(n, n, device=device, dtype=dtype)
    product = seconds(lambda: torch.mm(a, b, out=out), device, PROBE_REPEATS)
    source = torch.randn((1 << 30 if cuda else 1 << 26) // 4, device=device)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device, PROBE_REPEATS)
    moved = 2 * source.numel() * source.element_size()
    return {"tflops": 2 * n**3 / product * 1e-12, "gbps": moved / copy * 1e-9}
