"""Timing on the CPU: the fields, how many repeats, and when it stops, by a clock that is ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest

from rlbench.measure import kernels, timing


class Clock:
    """A clock that moves only when `run` is called, each time by the next of `steps`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Callable[[int], float]) -> None:
        self.now, self.runs, self._step = 0.0, 0, step
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self) -> None:
        self.now += self._step(self.runs)
        self.runs += 1


def test_fields_and_their_order_of_size() -> None:
    total = []
    sample = timing.measure(lambda: total.append(sum(range(2000))), "cpu", graph=True)
    assert list(sample) == ["timer", "median_us", "p10_us", "p90_us", "repeats", "cv"]
    assert sample["timer"] == "wall-clock"
    assert 0 < sample["p10_us"] <= sample["median_us"] <= sample["p90_us"]
    assert timing.MIN_REPEATS <= sample["repeats"] <= timing.MAX_REPEATS
    assert sample["cv"] >= 0
    assert len(total) == sample["repeats"] + timing.WARM_UP


def test_steady_launch_stops_at_the_fewest_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda _: 2**-10)
    sample = timing.measure(clock.run, "cpu", graph=False)
    microseconds = 2**-10 * 1e6
    assert sample == {
        "timer": "wall-clock",
        "median_us": microseconds,
        "p10_us": microseconds,
        "p90_us": microseconds,
        "repeats": timing.MIN_REPEATS,
        "cv": 0.0,
    }


def test_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda i: 1.0 if i < timing.WARM_UP else 2**-10)
    assert timing.measure(clock.run, "cpu", graph=False)["p90_us"] == 2**-10 * 1e6


def test_drifting_launch_is_repeated_until_the_time_is_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, lambda i: 2**-10 * 1.05**i)
    sample = timing.measure(clock.run, "cpu", graph=False)
    assert timing.MIN_REPEATS < sample["repeats"] < timing.MAX_REPEATS
    assert sample["p10_us"] < sample["median_us"] < sample["p90_us"]
    assert sample["cv"] > 0


def test_restless_but_short_launch_stops_at_the_most_repeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, lambda i: 2**-30 * 1.02**i)
    assert timing.measure(clock.run, "cpu", graph=False)["repeats"] == timing.MAX_REPEATS


def test_slow_launch_ends_after_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda _: 10.0)
    assert timing.measure(clock.run, "cpu", graph=False)["repeats"] == timing.BATCH


def test_summary_is_that_of_the_samples() -> None:
    samples = [float(n) for n in range(101)]
    found = timing._summary(samples[::-1])
    assert (found["median_us"], found["p10_us"], found["p90_us"]) == (50, 10, 90)
    assert found["repeats"] == 101
    assert found["cv"] == statistics.stdev(samples) / 50


def test_no_kernel_names_on_the_cpu() -> None:
    ran = []
    assert kernels.names(lambda: ran.append(1), "cpu") == []
    assert ran == [], "and nothing runs for them"


def test_fixed_number_of_repeats_gives_their_median(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [9.0] * timing.WARM_UP + [0.5, 4.0, 0.25, 1.0, 2.0]
    clock = Clock(monkeypatch, lambda i: steps[i])
    assert timing.seconds(clock.run, "cpu", 5) == pytest.approx(1.0, rel=1e-12)
    assert clock.runs == len(steps)
