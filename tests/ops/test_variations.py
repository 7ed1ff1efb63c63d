"""Variations: each changes a circumstance, leaves the question alone, and takes the target's rows.

An ideal engine stands in for real ones: its answer for a row is made of exact integers over the
row's own query and the keys and values it may see, and of nothing else. Where both sides of a
variation give it the same answer, the question is the same; what else differs is the circumstance.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import pytest
import torch

from rlbench.measure.bits import digest
from rlbench.ops._op import PRESETS, Call, Case, Kernel, Outputs, Run, Trial, Variation
from rlbench.ops.attention import OP
from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill
from rlbench.ops.attention.sizes import sizes
from rlbench.ops.attention.variations._around import LONG
from rlbench.ops.attention.workload import AttentionWorkload
from rlbench.results.vocabulary import Property
from rlbench.scenarios._invariance import run_trial

SMALL = {"q_heads": 2, "kv_heads": 1, "head_dim": 2}
INVARIANCE = ("batch", "chunked-prefill", "decode", "backward")
# (case, preset): one for each set of sizes.
SIZES = [("tiny", "default"), ("tiny", "full"), ("other", "default"), ("other", "full")]


def workload(name: str, preset: str, dtype: str = "bf16", **shape: int) -> AttentionWorkload:
    return AttentionWorkload(Case(name, dtype, {**SMALL, **shape}), preset, "cpu")


def words(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, …] of 16-bit floats -> [rows] integers that depend on every bit and its place."""
    flat = tensor.reshape(tensor.shape[0], -1).contiguous().view(torch.int16).long()
    return (flat * torch.arange(1, flat.shape[1] + 1)).sum(1)


def ideal(call: PackedPrefill | PagedPrefill) -> Run:
    def run() -> Outputs:
        out = torch.zeros(call.q.shape[0], 4, dtype=torch.int64)
        at = [0, *accumulate(call.q_lens)]
        k_at = [0, *accumulate(call.k_lens)]
        q = words(call.q)
        for i, (q_len, k_len) in enumerate(zip(call.q_lens, call.k_lens, strict=True)):
            if isinstance(call, PagedPrefill):
                table = call.block_table[i].long()
                k, v = (c[table].flatten(0, 1)[:k_len] for c in (call.k_cache, call.v_cache))
            else:
                k, v = (t[k_at[i] : k_at[i] + k_len] for t in (call.k, call.v))
            place = torch.arange(1, k_len + 1)
            seen = slice(k_len - q_len, k_len)
            rows = slice(at[i], at[i] + q_len)
            out[rows, 0] = q[rows]
            out[rows, 1] = (words(k) * place).cumsum(0)[seen]
            out[rows, 2] = (words(v) * place).cumsum(0)[seen]
            out[rows, 3] = place[seen]
        return {"out": fit(out, call.q.shape)}

    return run


def fit(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[tokens, n] padded with zeros to the shape an engine would return."""
    whole = values.new_zeros(shape[0], prod(shape[1:]))
    whole[:, : values.shape[1]] = values
    return whole.view(shape)


def ideal_backward(call: PackedBackward) -> Run:
    return lambda: {
        "dq": fit(torch.stack([words(call.q), words(call.dout)], 1), call.q.shape),
        "dk": fit(words(call.k)[:, None], call.k.shape),
        "dv": fit(words(call.v)[:, None], call.v.shape),
    }


IDEAL = Kernel(
    {"prefill": ideal, "paged-prefill": ideal, "decode": ideal, "backward": ideal_backward}
)


def circumstance(call: Call) -> tuple[Any, ...]:
    """What an engine may see of a call besides the target's own rows."""
    assert isinstance(call, (PackedPrefill, PagedPrefill))
    facts: list[Any] = [call.entry, call.q_lens, call.k_lens, call.q.shape[0], digest(call.q)]
    if isinstance(call, PagedPrefill):
        facts += [tuple(call.k_cache.shape), digest(call.block_table), digest(call.k_cache)]
    return tuple(facts)


def circumstances(trial: Trial) -> Iterator[tuple[Any, ...]]:
    for part in trial.parts():
        yield circumstance(part.call)


def expected_rows(load: AttentionWorkload, variation: Variation, scenario: str) -> torch.Tensor:
    """The words of the queries that this variation has to be about."""
    q = words(load.target.whole("q"))
    if scenario == "batch" and (tail := re.match(r"last (\d+ )?row", variation.name)):
        return q[-int(tail[1] or 1) :]
    if scenario != "decode":
        return q
    if variation.name.startswith("step at"):
        return words(load.sequence(LONG, load.sizes.long_context).whole("q"))[-1:]
    early = variation.name.startswith("early")
    return q[list(load.sizes.early_positions if early else load.sizes.positions)]


@pytest.mark.parametrize("scenario", INVARIANCE)
@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_every_variation_changes_its_circumstance_and_nothing_else(
    name: str, preset: str, scenario: str
) -> None:
    load = workload(name, preset)
    if name != "tiny":  # as many sequences as it has would take minutes
        load.sizes = dataclasses.replace(load.sizes, decode_batches=(1, 3, 15))
    baselines: dict[int, tuple[Trial, Outputs, list[Any]]] = {}
    for variation in load.variations(scenario):
        trial = variation.expected
        if id(trial) not in baselines:
            baselines = {id(trial): (trial, run_trial(IDEAL, trial), list(circumstances(trial)))}
        _, expected, before = baselines[id(trial)]
        actual = run_trial(IDEAL, variation.actual)
        assert expected.keys() == actual.keys()
        for tensor, want in expected.items():
            assert torch.equal(want, actual[tensor]), f"{variation.name}: the question changed"
        watched = actual["dq" if scenario == "backward" else "out"].flatten(1)[:, 0]
        wanted = expected_rows(load, variation, scenario)
        assert torch.equal(watched, wanted), f"{variation.name}: not the target's rows"
        repeated = variation.property is Property.BACKWARD_DETERMINISTIC
        after = list(circumstances(variation.actual))
        if repeated:
            assert after == before, f"{variation.name}: a repetition repeats everything"
        else:
            assert after != before, f"{variation.name}: nothing changed"
        assert not variation.expected.fresh_process


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("case", OP.models)
@pytest.mark.parametrize("scenario", INVARIANCE)
def test_names_are_unique_because_they_are_keys(case: str, preset: str, scenario: str) -> None:
    load = workload(case, preset)
    variations = list(load.variations(scenario))
    names = [variation.name for variation in variations]
    assert len(names) >= 5
    assert len(set(names)) == len(names)
    assert {v.pass_ for v in variations} == set(OP.scenarios[scenario])


@pytest.mark.parametrize("scenario", INVARIANCE)
def test_variations_are_the_same_in_two_workloads(scenario: str) -> None:
    """The fresh process finds its variation by name, and answers are compared by it."""
    one, two = (list(workload("tiny", "default").variations(scenario)) for _ in range(2))
    facts = [(v.name, v.pass_, v.property) for v in one]
    assert facts == [(v.name, v.pass_, v.property) for v in two]


def test_every_scenario_asks_about_its_property() -> None:
    load = workload("tiny", "default")
    asked = {s: {v.property for v in load.variations(s)} for s in INVARIANCE}
    assert asked == {
        "batch": {Property.BATCH_INVARIANT},
        "chunked-prefill": {Property.CHUNK_INVARIANT, Property.LAYOUT_INVARIANT},
        "decode": {
            Property.DECODE_INVARIANT,
            Property.BATCH_INVARIANT,
            Property.LAYOUT_INVARIANT,
        },
        "backward": {Property.BACKWARD_DETERMINISTIC, Property.BATCH_INVARIANT},
    }


def test_only_the_backward_asks_another_process() -> None:
    load = workload("tiny", "default")
    fresh = [(s, v.name) for s in INVARIANCE for v in load.variations(s) if v.actual.fresh_process]
    wanted = ["another process, alone", "another process, batch of 4"]
    assert fresh == [("backward", name) for name in wanted]


@pytest.mark.parametrize("scenario", INVARIANCE)
@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_variations_that_share_a_baseline_follow_one_another(
    name: str, preset: str, scenario: str
) -> None:
    """Otherwise the runner computes it again, and a nondeterministic engine answers otherwise."""
    order = [id(v.expected) for v in list(workload(name, preset).variations(scenario))]
    changes = sum(a != b for a, b in pairwise(order))
    assert changes == len(set(order)) - 1


def test_batches_put_the_target_first_in_the_middle_and_last() -> None:
    for name, preset in SIZES:
        places = [
            0 if p == 0 else 2 if p == len(lengths) else 1
            for _, lengths, p in sizes(Case(name, "bf16", SMALL), preset).batches
        ]
        assert set(places) == {0, 1, 2}


def test_chunks_are_of_aligned_and_of_odd_sizes() -> None:
    for name, preset in SIZES:
        chunks = sizes(Case(name, "bf16", SMALL), preset).chunks
        assert any(c % 16 == 0 for c in chunks) and any(c % 2 for c in chunks)


@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_decode_positions_lie_within_the_target(name: str, preset: str) -> None:
    s = sizes(Case(name, "bf16", SMALL), preset)
    assert all(0 <= p < s.target for p in (*s.positions, *s.early_positions))
    assert s.target - 1 in s.positions
    assert 0 in s.early_positions


def test_fingerprints_differ_between_cases_and_dtypes() -> None:
    prints = {
        OP.load(OP.case(model, dtype), "smoke", "cpu").fingerprint()
        for model in ("tiny", "qwen3-next-tp4", "llama3-70b-tp8", "llama3.2-1b", "gpt-oss-20b")
        for dtype in ("bf16", "fp16")
    }
    assert len(prints) == 10


def test_fingerprint_is_the_pinned_one() -> None:
    """Of the tiny case; it stands in every report, and merging refuses another."""
    assert OP.load(OP.case("tiny", "bf16"), "default", "cpu").fingerprint() == TINY_BF16
    assert OP.load(OP.case("tiny", "fp16"), "default", "cpu").fingerprint() == TINY_FP16


TINY_BF16 = "adf3943602a44e669759596d3ff4c64e58f1283625d2f063b5bda740c3e32dcc"
TINY_FP16 = "9b904fd328e96d3594ab2ee181688f633f6d74801ce1fb9aac1c1d11b957ab9c"


# --- exams and points -----------------------------------------------------------------------------


def test_exams_are_one_a_pass_with_references_of_their_shape() -> None:
    exams = list(workload("tiny", "default", head_dim=8).exams())
    assert [e.pass_ for e in exams] == list(OP.passes)
    for exam in exams:
        found, plain = exam.reference(), exam.plain()
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in plain.items()}
        assert all(t.dtype == torch.float64 for t in found.values())


@pytest.mark.parametrize(("name", "preset"), SIZES)
def test_points_of_one_pass_have_distinct_shapes_and_positive_work(name: str, preset: str) -> None:
    points = list(workload(name, preset).points())
    shapes = [(p.pass_, p.shape) for p in points]
    assert len(set(shapes)) == len(shapes)
    assert {p.pass_ for p in points} == set(OP.passes)
    assert all(p.flops > 0 and p.bytes > 0 for p in points)
    assert {(p.pass_, p.bound) for p in points} == {
        ("prefill", "compute"),
        ("decode", "memory"),
        ("backward", "compute"),
    }


def test_work_is_that_of_the_visible_pairs() -> None:
    """2 x 256 tokens etc. of 4 query heads and 2 KV heads of 64, counted pair by pair."""
    points = {
        (p.pass_, p.shape): p
        for p in workload("tiny", "default", q_heads=4, kv_heads=2, head_dim=64).points()
    }
    pairs = sum(range(1, 129))
    prefill = points["prefill", "4x128"]
    assert prefill.flops == 4 * 4 * pairs * 2 * 2 * 64  # sequences, heads, pairs, products, 2 D
    assert prefill.bytes == 4 * 128 * 64 * (4 + 4 + 2 + 2) * 2
    decode = points["decode", "8x256"]
    assert decode.flops == 8 * 4 * 256 * 2 * 2 * 64
    assert decode.bytes == 8 * 64 * 2 * (4 + 4 + 256 * (2 + 2))
    backward = points["backward", "1x256"]
    assert backward.flops == 2.5 * points["prefill", "1x256"].flops
    assert decode.launch_bound and not prefill.launch_bound


def test_point_calls_have_the_shape_they_are_named_after() -> None:
    for point in workload("tiny", "default").points():
        call = point.call()
        assert isinstance(call, (PackedPrefill, PagedPrefill))
        count, tokens = map(int, point.shape.split("x"))
        assert call.k_lens == (tokens,) * count
        assert call.q_lens == ((1,) * count if point.pass_ == "decode" else (tokens,) * count)
