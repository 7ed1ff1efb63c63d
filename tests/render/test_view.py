"""What tables show, as data: ratios, doubts, agreement, notes, broken claims."""

from __future__ import annotations

from typing import Any

import pytest
from sample_report import check, environment, errors, everything, point, probe, report, result

from rlbench.render import cells, pricing, sameness, view
from rlbench.results.schema import Report


def latencies(*made: tuple[str, str, float, str], environments: list[object]) -> Report:
    return report(
        [
            result(engine, "latency", "measured", where, points=[point("decode", "1x8", us, timer)])
            for engine, where, us, timer in made
        ],
        environments=environments,
    )


def prices(made: Report) -> dict[tuple[str, str], tuple[float, tuple[str, ...]]]:
    (sheet,) = view.sheets(made)
    found = pricing.prices(made, sheet, "decode", "1x8")
    return {key: (price.ratio, price.doubts) for key, price in found.items()}


def test_ratio_is_to_the_fastest_on_the_same_device_and_driver() -> None:
    made = latencies(
        ("a", "one", 10.0, "cuda-graph"),
        ("b", "two", 15.0, "cuda-graph"),
        ("c", "other", 2.0, "cuda-graph"),
        environments=[environment("one"), environment("two"), environment("other", "NVIDIA B200")],
    )
    assert prices(made) == {
        ("a", "one"): (1.0, ()),
        ("b", "two"): (1.5, ()),
        ("c", "other"): (1.0, ()),
    }


@pytest.mark.parametrize(
    ("timer", "clock", "doubts"),
    [
        ("cuda-graph", 100.0, ()),
        ("cuda-events", 100.0, ("timer",)),
        ("cuda-graph", 102.9, ()),
        ("cuda-graph", 103.1, ("clocks",)),
        ("cuda-graph", 96.0, ("clocks",)),
        ("cuda-events", 90.0, ("timer", "clocks")),
    ],
)
def test_doubts_are_another_timer_and_clocks_over_three_percent_apart(
    timer: str, clock: float, doubts: tuple[str, ...]
) -> None:
    made = latencies(
        ("a", "one", 10.0, "cuda-graph"),
        ("b", "one", 15.0, timer),
        environments=[environment("one", probes=[probe("a", 100.0), probe("b", clock)])],
    )
    assert prices(made)["b", "one"] == (1.5, doubts)
    assert prices(made)["a", "one"] == (1.0, ())


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        ({"decode.out 3": errors(1.0), "prefill.out 3": errors(50.0)}, False),
        ({"decode.out 3": errors(9.9)}, False),
        ({"decode.out 3": errors(10.1)}, True),
        ({"decode.out 3": errors(None, nonfinite=1)}, True),
    ],
)
def test_a_fast_wrong_answer_is_nobodys_yardstick(error: dict[str, Any], wrong: bool) -> None:
    made = report(
        [
            result("a", "accuracy", "measured", errors=error),
            result("a", "latency", "measured", points=[point("decode", "1x8", 10.0)]),
            result("b", "latency", "measured", points=[point("decode", "1x8", 15.0)]),
        ]
    )
    found = {engine: figures for (engine, _), figures in prices(made).items()}
    assert found["a"] == ((10 / 15, ("wrong",)) if wrong else (1.0, ()))
    assert found["b"] == (1.0 if wrong else 1.5, ())


def test_where_all_are_wrong_one_of_them_is_the_yardstick() -> None:
    made = report(
        [
            result("a", "accuracy", "measured", errors={"decode.out": errors(99.0)}),
            result("a", "latency", "measured", points=[point("decode", "1x8", 10.0)]),
        ]
    )
    assert prices(made) == {("a", "local"): (1.0, ("wrong",))}


def test_agreement_groups_engines_by_digest_largest_first() -> None:
    (sheet,) = view.sheets(everything())
    found = {
        name: [group.engines for group in groups]
        for name, groups in sameness.agreement(sheet).items()
    }
    assert found["batch prefill.out"] == [("fa4", "rlbench")]
    assert found["decode prefill.out"] == [("fa4",), ("rlbench",)]


def test_agreement_names_the_environments_of_an_engine_that_has_several() -> None:
    out = {"prefill.out": "a" * 64}
    other = {"prefill.out": "b" * 64}
    made = report(
        [
            result("fa3", "batch", "pass", "one", checks=[check("v")], digests=out),
            result("fa3", "batch", "pass", "two", checks=[check("v")], digests=other),
            result("fa2", "batch", "pass", "two", checks=[check("v")], digests=other),
        ]
    )
    (sheet,) = view.sheets(made)
    (groups,) = sameness.agreement(sheet).values()
    assert [group.engines for group in groups] == [("fa2", "fa3 (two)"), ("fa3 (one)",)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00390625, "3.9e-3"),
        (1.5, "1.5"),
        (25.0, "2.5e1"),
        (0.0, "±0"),
        (float("nan"), "NaN"),
        (float("inf"), "inf"),
        (1e-12, "1.0e-12"),
    ],
)
def test_magnitudes_are_short(value: float, text: str) -> None:
    assert sameness.magnitude(value) == text


def test_engine_unavailable_here_but_measured_elsewhere_has_one_row() -> None:
    made = report(
        [
            result("fa3", "batch", "unavailable", "local", reason="not installed"),
            result("fa3", "batch", "pass", "vllm", checks=[check("v")]),
            result("fa2", "batch", "unavailable", "local", reason="not installed"),
        ]
    )
    (sheet,) = view.sheets(made)
    assert [(r.engine, r.environment) for r in sheet.rows] == [("fa2", "local"), ("fa3", "vllm")]
    assert [r.engine for r in view.absent(sheet)] == ["fa2"]
    assert not view.twice(sheet)


def test_broken_claim_counts_once_a_case_and_only_for_its_property() -> None:
    made = report(
        [
            result("fa3:splits=1", "batch", "fail", "vllm", checks=[check("x", equal=False)] * 2),
            result(
                "fa3:splits=1",
                "decode",
                "fail",
                "vllm",
                checks=[check("y", equal=False, property="decode_invariant")],
            ),
        ]
    )
    (broken,) = view.broken_claims(made)
    assert (broken.engine, broken.case, broken.variation) == ("fa3:splits=1", "qwen3-next", "x")


def test_equal_reasons_are_one_note() -> None:
    made = report(
        [
            result(e, s, "unavailable", reason="not installed")
            for e in ("a", "b")
            for s in ("batch", "decode")
        ]
    )
    (note,) = view.notes(view.sheets(made)[0])
    assert (note.engines, note.scenarios) == (("a", "b"), ("batch", "decode"))
    assert (note.text, note.serious) == ("not installed", False)


def test_skipped_questions_and_nans_are_noted() -> None:
    made = report(
        [
            result(
                "a",
                "batch",
                "pass",
                checks=[check("x", nans=4)],
                skipped=[{"variation": "y", "reason": "no pages"}],
            ),
            result("a", "accuracy", "measured", errors={"out": errors(None, 2)}),
        ]
    )
    found = {note.text: note for note in view.notes(view.sheets(made)[0])}
    assert found["4 output elements are NaN or infinite"].serious
    assert found["2 output elements are NaN or infinite"].serious
    assert found["no pages"].variations == ("y",)
    assert cells.verdict(view.sheets(made)[0].rows[0].results["batch"]) == "pass 1/1* NaN!"


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0.04, "0.0 µs"),
        (45.67, "45.7 µs"),
        (99.96, "100 µs"),
        (234.5, "234 µs"),
        (999.7, "1.00 ms"),
        (1234.5, "1.23 ms"),
        (123456.0, "123 ms"),
    ],
)
def test_durations_read_well(us: float, text: str) -> None:
    assert view.duration(us) == text


def test_headline_is_the_longest_single_sequence_of_each_pass() -> None:
    points = [
        *(point("prefill", s, 1.0) for s in ("1x2048", "1x8192", "8x2048")),
        *(point("decode", s, 1.0) for s in ("1x1024", "1x32768", "128x8192")),
    ]
    made = report([result("a", "latency", "measured", points=points)])
    (sheet,) = view.sheets(made)
    assert view.headline(sheet) == [("prefill", "1x8192"), ("decode", "1x32768")]
    assert view.shapes(sheet) == [(p["pass"], p["shape"]) for p in points]
