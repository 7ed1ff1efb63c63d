"""The terminal's tables: within 80 columns, verdicts in words, and no obedience to a report."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from sample_report import (
    HOSTILE,
    NINE,
    environment,
    errors,
    everything,
    hostile,
    point,
    report,
    result,
)

from rlbench.differences import Difference, Differences
from rlbench.render import sameness, table
from rlbench.results.schema import Report


def shown(what: Report, width: int = 80, *, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        no_color=not colour,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
    )
    table.show(what, console)
    return out.getvalue()


def test_no_line_is_longer_than_eighty_columns() -> None:
    for made in (everything(), hostile()):
        for line in shown(made).splitlines():
            assert cell_len(line) <= 80, line


def test_verdicts_are_words_without_colour() -> None:
    text = shown(everything())
    assert "\x1b" not in text
    for word in ("pass 9/9", "FAIL 4/9", "unproven 9/9", "timeout", "crash", "oom", "error"):
        assert word in text, word
    assert "NaN!" in text


def test_nothing_in_a_cell_is_cut_at_eighty_columns() -> None:
    text = shown(everything())
    assert "…" not in text
    for number in ("1.23 ms 1.00×", "1.73 ms 1.40×", "45.6 µs 1.00×", "1.01×", "0.90×"):
        assert number in text, number


def test_marks_of_doubt_stand_beside_the_ratio_and_are_explained() -> None:
    text = shown(everything())
    assert "1.40×†" in text, "another timer than the fastest's"
    assert "25.0×~" in text, "probes 700 and 600"
    assert "another timer" in text and "clock probes" in text


def test_engines_without_a_measurement_have_a_note_and_no_row() -> None:
    lines = shown(everything()).splitlines()
    assert not any(line.startswith("fa2 ") for line in lines)
    assert any("fa2" in line and "module vllm is not installed" in line for line in lines)


def test_unproven_names_the_check_that_the_control_did_not_fail() -> None:
    text = " ".join(shown(everything()).split())
    assert "the control did not fail: the vacuous one" in text


def test_contradicted_claim_is_told_with_its_source() -> None:
    text = " ".join(shown(everything()).split())
    assert "claim contradicted: fa3:splits=1 is said to be batch_invariant (the manual)" in text
    assert "on qwen3-next it is not: variation 4" in text


def test_own_engine_is_first_and_control_last() -> None:
    lines = [line.split()[0] for line in shown(everything()).splitlines() if "/9" in line]
    assert lines[0] == "rlbench"
    assert lines[-1] == "control"


def test_text_of_a_report_is_shown_and_not_obeyed() -> None:
    text = shown(hostile())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert "[bold red]x[/]" in text.replace("\n", "")
    coloured = shown(hostile(), colour=True)
    assert "\x1b[31mred" not in coloured
    assert "\x1b]8" not in coloured, "no hyperlink"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_any_width_does(width: int) -> None:
    for line in shown(everything(), width).splitlines():
        assert cell_len(line) <= width


def test_empty_report_shows_nothing_and_does_not_fail() -> None:
    assert shown(report([])).strip() == ""


def test_long_shapes_still_fit() -> None:
    points = [point(p, "128x32768", 123456.0 * 8) for p in ("prefill", "decode", "backward")]
    slow = [point(p, "128x32768", 1e8) for p in ("prefill", "decode", "backward")]
    made = report(
        [
            result("torch-sdpa:backend=efficient", "latency", "measured", points=points),
            result("torch-sdpa:backend=math", "latency", "measured", points=slow),
        ],
        environments=[environment("local")],
    )
    text = shown(made)
    assert "…" not in text
    assert all(cell_len(line) <= 80 for line in text.splitlines())


def test_agreement_groups_engines_by_their_bits() -> None:
    same, other = "a" * 64, "b" * 64
    made = report(
        [
            result(engine, "batch", "pass", checks=NINE, digests={"prefill.out": digest})
            for engine, digest in (("fa3", same), ("fa4", same), ("fa2", other))
        ]
    )
    out = io.StringIO()
    table.agreement(made, Console(file=out, width=80, no_color=True))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    at = lines.index("batch prefill.out")
    assert lines[at + 1 : at + 3] == ["fa3 = fa4", "each its own: fa2"]


def test_agreement_does_not_obey_a_report_either() -> None:
    out = io.StringIO()
    table.agreement(hostile(), Console(file=out, width=80, no_color=True))
    assert "\x1b" not in out.getvalue()


# --- how far apart saved outputs are --------------------------------------------------------------


def many(count: int, first: str = "engine") -> tuple[Report, Differences]:
    """Engines of bits of their own, the pair (i, j) apart by i + 10 j; the last was not saved."""
    digests = [f"{i:064x}" for i in range(count)]
    made = report(
        [
            result(
                f"{first}-{i:02}",
                "accuracy",
                "measured",
                errors={"prefill.out 3": errors()},
                digests={"prefill.out 3": digest},
            )
            for i, digest in enumerate(digests)
        ]
    )
    pairs = {
        frozenset((digests[i], digests[j])): Difference(i + 10.0 * j, (i + 10.0 * j) / 1e12)
        for i in range(count - 1)
        for j in range(i + 1, count - 1)
    }
    last = ("attention", "qwen3-next", f"{first}-{count - 1:02}", "local", "accuracy")
    return made, Differences(pairs, set(digests[:-1]), {last})


def agreement(made: Report, differences: Differences, width: int = 80) -> str:
    out = io.StringIO()
    table.agreement(made, Console(file=out, width=width, no_color=True), differences)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_twenty_engines_fit_any_width_and_no_pair_is_lost(width: int) -> None:
    text = agreement(*many(21), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    for i in range(20):
        assert f" {i + 1}: engine-{i:02}" in text
        for j in range(i + 1, 20):
            assert sameness.magnitude(i + 10.0 * j) in text.split()
    rows: dict[str, list[str]] = {}
    for line in text.split("no saved tensor")[1].splitlines():
        words = line.split()
        if words and words[0].isdigit() and not all(word.isdigit() for word in words):
            rows.setdefault(words[0], []).extend(words[1:])
    assert [len(row) for row in rows.values()] == [20] * 20
    assert rows["1"][1] == "1.0e1" and rows["2"][0] == "1.0e-11", "largest above, mean below"
    assert rows["7"][6] == "·"


def test_outputs_that_were_not_saved_are_named() -> None:
    text = agreement(*many(4))
    assert "no saved tensor: engine-03" in text
    assert "no saved outputs: engine-03" in text


def test_one_saved_output_alone_has_no_matrix() -> None:
    text = agreement(*many(2))
    assert "each its own: engine-00, engine-01" in text
    assert "·" not in text.split("\n", 2)[2]


def test_the_matrix_does_not_obey_a_report() -> None:
    text = agreement(*many(4, HOSTILE))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert "[bold red]x[/]" in text
