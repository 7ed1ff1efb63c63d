"""A report with everything in it that tables show: made, not measured."""

from __future__ import annotations

from typing import Any

from rlbench.results.schema import Report
from rlbench.results.vocabulary import SCHEMA

Json = dict[str, Any]


def check(name: str, *, equal: bool = True, proven: bool = True, **more: Any) -> Json:
    return {
        "variation": name,
        "pass": "prefill",
        "property": "batch_invariant",
        "equal": equal,
        "elements": 100,
        "differing": 0 if equal else 7,
        "max_ulp": 0 if equal else 3,
        "nans": 0,
        "first": None,
        "proven": proven,
        **more,
    }


def errors(ratio: float | None = 1.0, nonfinite: int = 0) -> Json:
    figure = None if nonfinite else 0.001
    count = None if nonfinite else 1
    return {
        "max_abs": figure,
        "mean_abs": figure,
        "rel_rms": figure,
        "ulp_p50": count,
        "ulp_p99": count,
        "ulp_max": count,
        "ratio_to_torch": ratio,
        "nonfinite": nonfinite,
    }


def point(pass_: str, shape: str, median: float, timer: str = "cuda-events") -> Json:
    return {
        "pass": pass_,
        "shape": shape,
        "timer": timer,
        "median_us": median,
        "p10_us": median,
        "p90_us": median,
        "repeats": 20,
        "cv": 0.01,
        "tflops": 100.0,
        "percent_of_ceiling": 20.0,
    }


def result(
    engine: str, scenario: str, status: str, environment: str = "local", **more: Any
) -> Json:
    return {
        "op": "attention",
        "case": "qwen3-next",
        "engine": engine,
        "environment": environment,
        "scenario": scenario,
        "status": status,
        "command": f"rlbench attention --only {engine}",
        "seconds": 1.5,
        "at": "2026-01-01T00:00:00.000Z",
        **more,
    }


def environment(name: str, device: str = "NVIDIA H200", probes: list[Json] | None = None) -> Json:
    return {
        "id": name,
        "python": "3.11.9",
        "packages": {"torch": "2.13.0", "nvidia-cublas": "13"},
        "device": {"name": device, "driver": "580.1"},
        "probes": probes or [],
    }


def probe(engine: str, tflops: float) -> Json:
    return {"engine": engine, "when": "before", "at": "t", "tflops": tflops, "gbps": 4000.0}


def report(results: list[Json], **more: Any) -> Report:
    return Report.model_validate(
        {
            "schema": SCHEMA,
            "created": "2026-01-01T00:00:00.000Z",
            "argv": ["rlbench", "attention"],
            "rlbench": {"version": "0.1.0", "commit": None, "dirty": None},
            "environments": [environment("local"), environment("vllm")],
            "engines": [
                {
                    "id": "fa3:splits=1",
                    "environment": "vllm",
                    "claims": [{"property": "batch_invariant", "source": "the manual"}],
                }
            ],
            "cases": [
                {
                    "op": "attention",
                    "id": "qwen3-next",
                    "params": {"q_heads": 16, "kv_heads": 2, "head_dim": 256, "preset": "default"},
                    "dtype": "bf16",
                    "inputs_sha256": "0" * 64,
                }
            ],
            "results": results,
            **more,
        }
    )


INVARIANCE = ("batch", "chunked-prefill", "decode", "backward")
NINE = [check(f"variation {i}") for i in range(9)]


def everything() -> Report:
    """Every verdict, doubts, a broken claim, absent engines, several environments."""
    failed = [*NINE[:4], *(check(f"variation {i}", equal=False) for i in range(4, 9))]
    unproven = [*NINE[:8], check("the vacuous one", proven=False)]
    same, other = {"prefill.out": "a" * 64}, {"prefill.out": "b" * 64}
    results = [
        *(result("control", s, "fail", checks=failed) for s in INVARIANCE),
        *(result("rlbench", s, "pass", checks=NINE, digests=same) for s in INVARIANCE[:3]),
        result("rlbench", "backward", "unsupported", reason="its backward is not written yet"),
        *(result("fa4", s, "pass", checks=NINE, digests=same) for s in INVARIANCE[:2]),
        result("fa4", "decode", "unproven", checks=unproven, digests=other),
        result("fa4", "backward", "timeout", reason="no answer within 600 s"),
        result("fa3:splits=1", "batch", "fail", "vllm", checks=failed),
        result(
            "fa3:splits=1", "decode", "crash", "vllm", reason="the worker was killed by SIGSEGV"
        ),
        result("torch-sdpa:backend=efficient", "batch", "oom", reason="CUDA out of memory"),
        result("torch-sdpa:backend=efficient", "decode", "error", reason="ValueError: no"),
        *(
            result("fa2", s, "unavailable", reason="module vllm is not installed")
            for s in INVARIANCE
        ),
        result("rlbench", "accuracy", "measured", errors={"prefill.out 1000": errors(1.01)}),
        result("fa4", "accuracy", "measured", errors={"prefill.out 1000": errors(None, 3)}),
        result(
            "fa3:splits=1", "accuracy", "measured", "vllm", errors={"prefill.out 1000": errors(0.9)}
        ),
    ]
    latencies: list[tuple[str, str, float, str]] = [
        ("rlbench", "local", 1.0, "cuda-graph"),
        ("fa4", "local", 1.4, "cuda-events"),
        ("fa3:splits=1", "vllm", 25.0, "cuda-graph"),
    ]
    for engine, where, factor, timer in latencies:
        points = [
            point("prefill", "1x8192", 1234.5 * factor),
            point("prefill", "8x2048", 2345.6 * factor),
            point("decode", "1x32768", 45.6 * factor, timer),
            point("backward", "1x8192", 4321.0 * factor),
        ]
        results.append(result(engine, "latency", "measured", where, points=points))
    return report(
        results,
        environments=[
            environment("local", probes=[probe("rlbench", 700.0), probe("fa4", 710.0)]),
            environment("vllm", probes=[probe("fa3:splits=1", 600.0)]),
        ],
    )


HOSTILE = (
    "[bold red]x[/] \x1b[31mred\x1b[0m \x9b31m\na|b `code` <script>alert(1)</script> "
    "[click](http://evil.example) ![i](http://evil.example/i.png) **b** # h &lt; \u202egnp \r\x07"
)


def hostile() -> Report:
    """The same words where a report may hold any text."""
    first = {"tensor": HOSTILE, "index": [0], "expected": HOSTILE, "got": HOSTILE}
    bad = check(HOSTILE, equal=False, first=first)
    words = dict.fromkeys(("case", "engine"), HOSTILE) | {"environment": HOSTILE, "op": HOSTILE}
    made = [
        result(
            "e", "batch", "fail", checks=[bad], skipped=[{"variation": HOSTILE, "reason": HOSTILE}]
        )
        | words,
        result("e", "decode", "crash", reason=HOSTILE, output=HOSTILE) | words,
        result("e", "accuracy", "measured", errors={HOSTILE: errors()}, digests={HOSTILE: "a" * 64})
        | words,
        result("e", "latency", "measured", points=[point(HOSTILE, HOSTILE, 3.0)]) | words,
        result("e", "accuracy", "measured", errors={HOSTILE: errors()}, digests={HOSTILE: "a" * 64})
        | words
        | {"engine": "second"},
    ]
    env = environment(HOSTILE, device=HOSTILE)
    env["python"] = HOSTILE
    env["packages"] = {HOSTILE: HOSTILE}
    env["device"]["driver"] = HOSTILE
    return report(
        made,
        created=HOSTILE,
        argv=[HOSTILE],
        runs=[
            {
                "created": HOSTILE,
                "argv": [HOSTILE],
                "rlbench": {"version": HOSTILE, "commit": None, "dirty": None},
            }
        ],
        rlbench={"version": HOSTILE, "commit": HOSTILE, "dirty": None},
        environments=[env],
        engines=[
            {
                "id": HOSTILE,
                "environment": HOSTILE,
                "claims": [{"property": "batch_invariant", "source": HOSTILE}],
            }
        ],
        cases=[
            {
                "op": HOSTILE,
                "id": HOSTILE,
                "params": {HOSTILE: HOSTILE},
                "dtype": HOSTILE,
                "inputs_sha256": "0" * 64,
            }
        ],
    )
