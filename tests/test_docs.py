"""The pages tell the truth: tables come from reports, files that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlbench.errors import UsageError
from rlbench.merge import merge
from rlbench.render import markdown, readme
from rlbench.results import store

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "reports").rglob("*.md"),
]
REPORTS = sorted((ROOT / "reports").rglob("*.json"))
HOLDERS = ("<", "*", "{")
"""Characters of a path that stands for many."""


def test_tables_of_the_readme_are_made_from_the_reports_they_name() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.BLOCK.search(text)
    assert readme.fill(text, ROOT) == text, "make readme"


def test_case_that_a_report_does_not_have_is_named() -> None:
    text = "<!-- report: reports/h200/attention.json case: nope -->\n<!-- end of report -->"
    with pytest.raises(UsageError, match="has no case 'nope'"):
        readme.fill(text, ROOT)


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_published_reports_are_valid_and_their_markdown_is_current(path: Path) -> None:
    report = store.load(path)
    assert report.results
    page = path.with_suffix(".md")
    if page.exists():
        assert page.read_text(encoding="utf-8") == markdown.render(report)


def test_published_report_is_the_merge_of_its_raw_ones() -> None:
    raw = sorted((ROOT / "reports/h200/raw").glob("*.json"))
    merged = merge([(path.name, store.load(path)) for path in raw])
    assert store.dump(merged) == (ROOT / "reports/h200/attention.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    paths = re.findall(r"`((?:rlbench|docs|tests|reports)/[\w./-]*)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [p for p in paths if not (ROOT / p).exists() and not set(p) & set(HOLDERS)]
    assert not missing
