"""Markdown and CSV: every figure, and text that does nothing but be read."""

from __future__ import annotations

import csv as reader
import io
import re

import pytest
from markdown_it import MarkdownIt
from sample_report import HOSTILE, check, errors, everything, hostile, report, result

from rlbench.differences import Difference, Differences
from rlbench.render import csv, markdown

ALLOWED = {
    *("heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "text"),
    *("table_open", "table_close", "thead_open", "thead_close", "tbody_open", "tbody_close"),
    *("tr_open", "tr_close", "th_open", "th_close", "td_open", "td_close", "softbreak"),
    *("bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"),
    *("strong_open", "strong_close", "code_inline", "html_inline", "text_special", "hr"),
}


def tokens(text: str) -> list[tuple[str, str]]:
    """(type, content) of everything a Markdown reader sees, nested ones included."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        found.append((token.type, token.content if token.type != "inline" else ""))
        found += [(child.type, child.content) for child in token.children or ()]
    return found


def test_markdown_has_every_verdict_figure_and_note() -> None:
    text = markdown.render(everything())
    for word in (
        *("pass 9/9", "**FAIL 4/9**", "unproven 9/9", "timeout", "crash"),
        *("1.23 ms 1.00×", "25.0×~", "(100 TFLOP/s)", "8x2048", "1.00e-03"),
        *("another timer", "clock probes", "the vacuous one", "module vllm is not installed"),
        *("## Claims contradicted", "NVIDIA H200", "driver 580.1", "torch 2.13.0"),
    ):
        assert word in text, word
    assert "nvidia-cublas" not in text


def test_markdown_groups_engines_whose_bits_agree() -> None:
    text = markdown.render(everything())
    (line,) = [x for x in text.splitlines() if x.startswith("| batch prefill.out")]
    assert line == "| batch prefill.out | fa4 = rlbench | – |"


def test_markdown_of_hostile_differences_is_plain_text_in_whole_tables() -> None:
    names = [HOSTILE, f"{HOSTILE} 2"]
    made = report(
        [
            result(
                name,
                "accuracy",
                "measured",
                errors={HOSTILE: errors()},
                digests={HOSTILE: digit * 64},
            )
            for name, digit in zip(names, "ab", strict=True)
        ]
    )
    pair = {frozenset(("a" * 64, "b" * 64)): Difference(0.5, 0.25)}
    missing = ("attention", "qwen3-next", HOSTILE, "local", "accuracy")
    found = Differences(pair, {"a" * 64, "b" * 64}, {missing})
    for text in (markdown.render(made, found), markdown.agreement(made, found)):
        assert "### How far apart outputs are" in text
        (head,) = [x for x in text.splitlines() if x == "|  | engines | 1 | 2 |"]
        assert head
        assert re.search(r"^\| 1 \| .* \| · \| 5\.0e-1 \|$", text, re.MULTILINE)
        assert re.search(r"^\| 2 \| .* \| 2\.5e-1 \| · \|$", text, re.MULTILINE)
        assert "No saved outputs: " in text
        assert {kind for kind, _ in tokens(text)} <= ALLOWED
        assert {t for kind, t in tokens(text) if kind == "html_inline"} <= {"<br>"}
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_markdown_tables_are_whole() -> None:
    for made in (everything(), hostile()):
        rows = [x for x in markdown.render(made).splitlines() if x.startswith("|")]
        widths: list[int] = []
        for previous, row in zip(["", *rows], rows, strict=False):
            cells = len(re.findall(r"(?<!\\)\|", row)) - 1
            if set(row) <= set("|- "):
                assert cells == len(re.findall(r"(?<!\\)\|", previous)) - 1
                widths.append(cells)
            elif widths and "---" in "".join(rows[: rows.index(row)]):
                assert cells >= 1
        assert widths


def test_markdown_of_a_hostile_report_is_plain_text() -> None:
    found = tokens(markdown.render(hostile()))
    assert {kind for kind, _ in found} <= ALLOWED
    assert {text for kind, text in found if kind == "html_inline"} <= {"<br>"}
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", markdown.render(hostile()))


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "[click](http://evil.example)",
        "![i](http://evil.example/i.png)",
        "http://evil.example www.evil.example",
        "**bold** _it_ ~~no~~ `code` ``two``",
        "# heading",
        "a | b",
        "&lt;script&gt; &amp; &#60;",
        "back\\slash \\| \\`",
        "- item",
        "1. item",
        "+ item",
    ],
)
def test_escaped_text_reads_as_it_was(text: str) -> None:
    html = MarkdownIt("commonmark").render("x " + markdown.escape(text))
    shown = re.sub(r"</?p>", "", html).strip()
    for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        shown = shown.replace(entity, sign)
    assert "<a" not in html and "<img" not in html and "<em" not in html and "<code" not in html
    assert shown == "x " + text


def test_code_stays_code() -> None:
    kinds = tokens(f"- `{markdown.escape_code(HOSTILE)}`")
    assert [kind for kind, _ in kinds if kind.startswith(("link", "image", "html"))] == []
    assert "code_inline" in {kind for kind, _ in kinds}


def test_empty_report_renders() -> None:
    assert "## Provenance" in markdown.render(report([]))
    assert csv.render(report([])).splitlines() == [",".join(csv.HEAD)]


# --- CSV ------------------------------------------------------------------------------------------


def rows(text: str) -> list[dict[str, str]]:
    return list(reader.DictReader(io.StringIO(text)))


def test_csv_has_a_line_a_figure() -> None:
    found = rows(csv.render(everything()))
    assert list(found[0]) == list(csv.HEAD)
    own = [r for r in found if r["engine"] == "rlbench" and r["scenario"] == "latency"]
    values = {(r["what"], r["figure"]): r["value"] for r in own}
    assert values["prefill 1x8192", "median_us"] == "1234.5"
    assert values["decode 1x32768", "timer"] == "cuda-graph"
    assert values["", "seconds"] == "1.5"
    timeout = [r for r in found if r["status"] == "timeout"]
    assert [r["reason"] for r in timeout] == ["no answer within 600 s"]
    equal = [r["value"] for r in found if r["engine"] == "control" and r["figure"] == "equal"]
    assert equal.count("True") == 16 and equal.count("False") == 20


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", "\r=", " =", "\n@"])
def test_csv_cells_are_no_formulas(start: str) -> None:
    text = f"{start}HYPERLINK(1)"
    made = report(
        [
            result(text, "decode", "crash", reason=text) | {"case": text, "environment": text},
            result("e", "batch", "fail", checks=[check(text)]),
            result("e", "accuracy", "measured", errors={text: errors()}),
        ]
    )
    for row in rows(csv.render(made)):
        for column, cell in row.items():
            if column != "value":
                assert not cell.strip().startswith(("=", "+", "-", "@")), column


def test_csv_lines_stay_lines() -> None:
    text = csv.render(hostile())
    assert len(text.splitlines()) == len(rows(text)) + 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
