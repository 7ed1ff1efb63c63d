"""Merging is a union: order and repetition never matter, nothing is lost, conflicts have names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlbench.errors import MergeError
from rlbench.merge import merge
from rlbench.results import store
from rlbench.results.schema import Report
from rlbench.results.vocabulary import SCHEMA

Json = dict[str, Any]
FAST = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = st.sampled_from(["a", "b", "c"])
TIMES = st.sampled_from([f"2026-01-0{d}T00:00:00.000Z" for d in range(1, 6)])
VERSION = {"version": "0.1.0", "commit": None, "dirty": None}
DIGESTS = st.sampled_from(["0" * 64, "1" * 64])
EXTRA = st.dictionaries(
    st.sampled_from(["new", "newer"]), st.sampled_from([1, "x", None, [1], {"k": 2}]), max_size=2
)

# One answer for each key: reports drawn from these never conflict.
FACTS = {"python": "3.11.1", "packages": {"torch": "2.13.0"}, "device": {"name": "CPU"}}


def agreed(*parts: str) -> int:
    """A number that follows from the key, so that all reports give the same answer."""
    return sum(map(ord, "".join(parts)))


@st.composite
def results(draw: st.DrawFn, *, conflicting: bool) -> Json:
    case, engine, environment = draw(NAMES), draw(NAMES), draw(NAMES)
    fact = draw(st.integers(0, 1)) if conflicting else agreed(case, engine, environment) % 2
    return {
        "op": "attention",
        "case": case,
        "engine": engine,
        "environment": environment,
        "scenario": "batch",
        "status": "oom",
        "reason": f"reason {fact}",
        "command": "rlbench attention",
        "seconds": draw(st.sampled_from([0.5, 1.5])),
        "at": draw(TIMES),
    }


@st.composite
def reports(draw: st.DrawFn, *, conflicting: bool = False) -> Report:
    def some(names: list[str]) -> list[str]:
        return draw(st.lists(st.sampled_from(names), unique=True, max_size=3))

    def digest(case: str) -> str:
        return draw(DIGESTS) if conflicting else str(agreed(case) % 2) * 64

    probes = st.fixed_dictionaries(
        {
            "engine": NAMES,
            "when": st.sampled_from(["before", "after"]),
            "at": TIMES,
            "tflops": st.sampled_from([1.0, 2.0]),
            "gbps": st.just(3.0),
        }
    )
    found = {
        (r["case"], r["engine"], r["environment"]): r
        for r in draw(st.lists(results(conflicting=conflicting), max_size=4))
    }
    data: Json = {
        **draw(EXTRA),
        "schema": SCHEMA,
        "created": draw(TIMES),
        "argv": ["rlbench", draw(NAMES)],
        "rlbench": VERSION,
        "environments": [
            {"id": i, **FACTS, "probes": draw(st.lists(probes, max_size=2)), **draw(EXTRA)}
            for i in some(["a", "b", "c"])
        ],
        "engines": [
            {
                "id": i,
                "environment": "a",
                "claims": [{"property": "batch_invariant", "source": s} for s in some(["s", "t"])],
                "resolved": {k: f"{i}{k}" for k in some(["backend", "splits"])},
                **draw(EXTRA),
            }
            for i in some(["a", "b", "c"])
        ],
        "cases": [
            {
                "op": "attention",
                "id": i,
                "params": {"q_heads": 4},
                "dtype": "bf16",
                "inputs_sha256": digest(i),
                **draw(EXTRA),
            }
            for i in some(["a", "b", "c"])
        ],
        "results": list(found.values()),
    }
    return Report.model_validate(data)


def named(*given: Report) -> list[tuple[str, Report]]:
    return [(f"{i}.json", report) for i, report in enumerate(given)]


def content(report: Report) -> Json:
    """What a report's file says, the order of its fields aside."""
    found: Json = json.loads(store.dump(report))
    return found


def merged(*given: Report, newest: bool = False) -> Json:
    return content(merge(named(*given), newest=newest))


@FAST
@given(reports(), reports())
def test_order_never_matters(a: Report, b: Report) -> None:
    assert merged(a, b) == merged(b, a)


@FAST
@given(reports(), reports(), reports())
def test_grouping_never_matters(a: Report, b: Report, c: Report) -> None:
    together = merged(a, b, c)
    assert merged(merge(named(a, b)), c) == together
    assert merged(a, merge(named(b, c))) == together


@FAST
@given(reports(), reports())
def test_merging_again_changes_nothing(a: Report, b: Report) -> None:
    once = merge(named(a, b))
    assert merged(once, once) == merged(once) == merged(once, a) == merged(b, once)
    assert merged(once) == content(once)
    assert merged(a, a) == merged(a)


@FAST
@given(reports(), reports())
def test_merged_report_is_a_valid_file_with_every_key(a: Report, b: Report) -> None:
    one = store.parse(json.dumps(merged(a, b)), "merged")
    assert {r.key for r in one.results} == {r.key for r in (*a.results, *b.results)}
    assert {e.id for e in one.environments} == {e.id for e in (*a.environments, *b.environments)}
    assert {c.id for c in one.cases} == {c.id for c in (*a.cases, *b.cases)}
    assert len({r.key for r in one.results}) == len(one.results)


def outcome(*given: Report) -> Json | str:
    try:
        return merged(*given)
    except MergeError:
        return "conflict"


@FAST
@given(reports(conflicting=True), reports(conflicting=True))
def test_conflict_is_one_in_both_orders(a: Report, b: Report) -> None:
    outcomes = [outcome(a, b), outcome(b, a)]
    assert outcomes[0] == outcomes[1]
    conflicts = any(
        x.key == y.key and x.reason != y.reason for x in a.results for y in b.results
    ) or any(x.id == y.id and x.inputs_sha256 != y.inputs_sha256 for x in a.cases for y in b.cases)
    assert (outcomes[0] == "conflict") is conflicts


@FAST
@given(reports(conflicting=True), reports(conflicting=True), reports(conflicting=True))
def test_newest_settles_results_in_any_order_and_grouping(a: Report, b: Report, c: Report) -> None:
    a, b, c = (r.model_copy(update={"cases": []}) for r in (a, b, c))
    together = merged(a, b, c, newest=True)
    assert merged(c, b, a, newest=True) == together
    assert merged(merge(named(b, a), newest=True), c, newest=True) == together
    assert merged(a, merge(named(c, b), newest=True), newest=True) == together
    for kept in store.parse(json.dumps(together), "r").results:
        rivals = [r for report in (a, b, c) for r in report.results if r.key == kept.key]
        assert kept.at == max(r.at for r in rivals)


# --- by hand --------------------------------------------------------------------------------------


def base() -> Json:
    return {
        "schema": SCHEMA,
        "created": "2026-01-01T00:00:00.000Z",
        "argv": ["rlbench", "attention"],
        "rlbench": copy.deepcopy(VERSION),
        "environments": [{"id": "local", **copy.deepcopy(FACTS), "probes": []}],
        "engines": [
            {"id": "fa4", "environment": "local", "claims": [], "resolved": {"splits": "1"}}
        ],
        "cases": [
            {
                "op": "attention",
                "id": "tiny",
                "params": {"q_heads": 4, "preset": "default"},
                "dtype": "bf16",
                "inputs_sha256": "a" * 64,
            }
        ],
        "results": [
            {
                "op": "attention",
                "case": "tiny",
                "engine": "fa4",
                "environment": "local",
                "scenario": "batch",
                "status": "oom",
                "reason": "no memory",
                "command": "rlbench attention",
                "seconds": 1.0,
                "at": "2026-01-01T00:00:00.000Z",
            }
        ],
    }


def pair(change: Callable[[Json], object]) -> list[tuple[str, Report]]:
    other = base()
    change(other)
    return [
        ("one.json", Report.model_validate(base())),
        ("two.json", Report.model_validate(other)),
    ]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["cases"][0].update(inputs_sha256="b" * 64), ["'tiny'", "inputs differ"]),
        (lambda r: r["cases"][0]["params"].update(preset="full"), ["'tiny'", "preset", "full"]),
        (lambda r: r["cases"][0].update(dtype="fp16"), ["'tiny'", "bf16", "fp16"]),
        (lambda r: r["environments"][0].update(python="3.12"), ["'local'", "python", "3.12"]),
        (
            lambda r: r["environments"][0]["packages"].update(torch="2.14"),
            ["'local'", "packages", "torch", "2.13.0", "2.14"],
        ),
        (
            lambda r: r["environments"][0].update(device={"name": "GPU"}),
            ["'local'", "device", "GPU"],
        ),
        (lambda r: r["engines"][0].update(resolved={"splits": "8"}), ["'fa4'", "splits", "'8'"]),
        (
            lambda r: r["results"][0].update(reason="other"),
            ["attention / tiny / fa4 / local / batch", "--on-conflict newest"],
        ),
        (lambda r: r["results"][0].update(status="timeout"), ["oom", "timeout"]),
    ],
)
def test_contradiction_names_both_files_and_what_it_is_about(
    change: Callable[[Json], object], words: list[str], order: int
) -> None:
    with pytest.raises(MergeError) as caught:
        merge(pair(change)[::order])
    message = str(caught.value)
    for word in ["one.json", "two.json", *words]:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("order", [1, -1])
def test_what_every_run_measures_anew_is_no_conflict_and_the_later_stays(order: int) -> None:
    def later(report: Json) -> None:
        report["results"][0].update(seconds=9.0, at="2026-01-02T00:00:00.000Z")

    (result,) = merge(pair(later)[::order]).results
    assert (result.seconds, result.at) == (9.0, "2026-01-02T00:00:00.000Z")


@pytest.mark.parametrize("order", [1, -1])
def test_newest_keeps_the_later_answer_but_no_other_contradiction(order: int) -> None:
    def later(report: Json) -> None:
        report["results"][0].update(reason="later", at="2026-01-02T00:00:00.000Z")

    (result,) = merge(pair(later)[::order], newest=True).results
    assert result.reason == "later"
    with pytest.raises(MergeError, match="inputs differ"):
        merge(pair(lambda r: r["cases"][0].update(inputs_sha256="b" * 64)), newest=True)


def test_unknown_fields_of_every_level_are_kept() -> None:
    def extend(report: Json) -> None:
        report["future"] = {"a": 1}
        report["rlbench"]["future"] = 1
        report["environments"][0]["future"] = 2
        report["environments"][0]["device"]["future"] = 3
        report["engines"][0]["future"] = 4
        report["engines"][0]["claims"] = [
            {"property": "batch_invariant", "source": "s", "future": 5}
        ]
        report["cases"][0]["future"] = 6
        report["cases"][0]["params"]["future"] = 7
        report["results"][0]["future"] = 8

    extended = base()
    extend(extended)
    alone = json.loads(store.dump(merge([("x", Report.model_validate(extended))])))
    alone_runs = alone.pop("runs")
    assert alone == extended
    assert alone_runs[0]["rlbench"]["future"] == 1


@pytest.mark.parametrize("place", ["environments", "engines", "cases"])
def test_unknown_field_that_one_side_has_is_kept(place: str) -> None:
    both = pair(lambda r: r[place][0].update(future="kept"))
    for order in (both, both[::-1]):
        found = json.loads(store.dump(merge(order)))
        assert found[place][0]["future"] == "kept"


def test_files_merged_in_either_order_are_equal_byte_for_byte() -> None:
    def extend(report: Json) -> None:
        report["newer"] = 2
        report["cases"][0]["newer"] = 2

    first = base()
    first["new"] = 1
    first["cases"][0]["new"] = 1
    second = base()
    extend(second)
    both = [("a", Report.model_validate(first)), ("b", Report.model_validate(second))]
    assert store.dump(merge(both)) == store.dump(merge(both[::-1]))


def test_claims_resolutions_probes_and_runs_are_united() -> None:
    probe = {"engine": "fa4", "when": "before", "at": "t", "tflops": 1.0, "gbps": 2.0}

    def add(report: Json) -> None:
        report["engines"][0]["resolved"] = {"backend": "x"}
        report["engines"][0]["claims"] = [{"property": "batch_invariant", "source": "s"}]
        report["environments"][0]["probes"] = [probe]
        report["created"] = "2026-01-03T00:00:00.000Z"
        report["argv"] = ["rlbench", "later"]

    one = merge(pair(add))
    assert one.engines[0].resolved == {"backend": "x", "splits": "1"}
    assert [c.source for c in one.engines[0].claims] == ["s"]
    assert len(one.environments[0].probes) == 1
    assert [run.argv[1] for run in one.runs] == ["attention", "later"]
    assert (one.created, one.argv[1]) == ("2026-01-03T00:00:00.000Z", "later")


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(MergeError, match="at least one"):
        merge([])


def test_inputs_are_left_as_they_were() -> None:
    both = pair(lambda r: r["engines"][0].update(resolved={"backend": "x"}))
    before = [store.dump(report) for _, report in both]
    merge(both)
    assert [store.dump(report) for _, report in both] == before
