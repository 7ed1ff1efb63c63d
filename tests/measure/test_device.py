"""The device's description and ceilings, on the CPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlbench.measure import device


def test_cpu_has_a_name_and_nothing_that_only_gpus_have() -> None:
    found = device.describe("cpu")
    assert list(found) == ["name", "compute_capability", "sms", "memory", "driver", "cuda"]
    assert found.pop("name")
    assert set(found.values()) == {None}


def test_cpu_name_is_the_first_model_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor: 0\nmodel name\t: Some: CPU @ 2 GHz\nmodel name\t: Another\n"
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert device.describe("cpu")["name"] == "Some: CPU @ 2 GHz"


def test_cpu_without_a_readable_name_is_called_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert device.describe("cpu")["name"] == "CPU"
    monkeypatch.setattr(Path, "read_text", lambda _: "nothing of the kind")
    assert device.describe("cpu")["name"] == "CPU"


def test_driver_is_unknown_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert device._driver() is None


def test_probe_measures_positive_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PROBE_REPEATS", 1)
    found = device.probe("cpu")
    assert list(found) == ["tflops", "gbps"]
    assert all(math.isfinite(value) and value > 0 for value in found.values())


def test_probe_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "seconds", lambda run, device, repeats: 0.5)
    found = device.probe("cpu")
    assert found["tflops"] == pytest.approx(2 * 1024**3 / 0.5 * 1e-12, rel=1e-14)
    assert found["gbps"] == pytest.approx(2 * 2**26 / 0.5 * 1e-9, rel=1e-14)
