"""How long a launch takes on the device. docs/measuring.md says why it is done this way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

WARM_UP = 3
MIN_REPEATS = 20
MAX_REPEATS = 400
BUDGET_S = 0.5
STABLE = 0.005
"""The median is stable when ten more repeats move it by less than this."""
BATCH = 10


def measure(run: Callable[[], object], device: str, *, graph: bool) -> dict[str, Any]:
    """Time `run`, a launch bound to its inputs, with cold caches.

    graph: replay a CUDA graph of it, for launches so short that Python would be timed instead.
    Falls back to device events, and says so in `timer_note`, where the engine cannot be captured.

    Returns `timer` (`cuda-graph`, `cuda-events` or `wall-clock`), `median_us`, `p10_us`,
    `p90_us`, `repeats`, `cv` (standard deviation over mean) and, if there is one, `timer_note`.
    """
    if not device.startswith("cuda"):
        return {"timer": "wall-clock", **_summary(_repeat(partial(_wall_clock, run), run))}
    note = None
    timer = "cuda-events"
    launch = run
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    if graph:
        try:
            launch = _capture(run)
            timer = "cuda-graph"
        except RuntimeError as why:
            note = f"no CUDA graph: {str(why).splitlines()[0][:160]}"
            torch.cuda.synchronize()
    clock = _EventClock(launch)
    sample = {"timer": timer, **_summary(_repeat(clock.once, launch))}
    return {**sample, "timer_note": note} if note else sample


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of `run`, taken as latencies are but for a fixed number of repeats."""
    cuda = device.startswith("cuda")
    for _ in range(WARM_UP):
        run()
    once = _EventClock(run).once if cuda else partial(_wall_clock, run)
    return statistics.median(once() for _ in range(repeats)) * 1e-6


def _repeat(once: Callable[[], float], run: Callable[[], object]) -> list[float]:
    """Microseconds of repeated calls, until the median settles or the time is spent."""
    for _ in range(WARM_UP):
        run()
    samples: list[float] = []
    deadline = time.perf_counter() + BUDGET_S
    median = 0.0
    while len(samples) < MAX_REPEATS:
        samples += [once() for _ in range(BATCH)]
        previous, median = median, statistics.median(samples)
        settled = abs(median - previous) <= STABLE * median
        late = time.perf_counter() > deadline
        if late or (settled and len(samples) >= MIN_REPEATS):
            break
    return samples


def _summary(samples: list[float]) -> dict[str, Any]:
    ordered = sorted(samples)
    last = len(ordered) - 1
    mean = statistics.fmean(ordered)
    return {
        "median_us": statistics.median(ordered),
        "p10_us": ordered[round(0.1 * last)],
        "p90_us": ordered[round(0.9 * last)],
        "repeats": len(ordered),
        "cv": statistics.stdev(ordered) / mean if mean else 0.0,
    }


def _wall_clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def _capture(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a CUDA graph. Raises RuntimeError where it synchronizes or allocates outside."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Two events that take the time."""
    pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    return pair[0], pair[1]


class _EventClock:
    """Device events around one launch: L2 flushed before, and the device kept busy meanwhile.

    Without the wait, an engine whose Python is slower than its kernel would have the gap between
    the first event and its launch counted as its time.
    """

    def __init__(self, launch: Callable[[], object]) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.launch = launch
        self.scratch = torch.empty(
            2 * properties.L2_cache_size // 4 + 1, dtype=torch.int32, device="cuda"
        )
        self.wait_cycles = int(2 * _host_seconds(launch) * 2e9) + 20_000

    def once(self) -> float:
        start, stop = events()
        self.scratch.zero_()
        torch.cuda._sleep(self.wait_cycles)  # type: ignore[no-untyped-call]
        start.record()
        self.launch()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3


def _host_seconds(launch: Callable[[], object]) -> float:
    """How long the host needs to enqueue one launch."""
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        launch()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return min(statistics.median(taken), 0.02)
