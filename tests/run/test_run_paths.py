"""Folders of this machine are cut out of whatever goes into a report."""

from __future__ import annotations

import pytest

from rlbench.run.process import tail, without_folders


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/someone/x.cu:3: error", "x.cu:3: error"),
        ('File "/v/lib/python3.11/site-packages/torch/_ops.py"', 'File "torch/_ops.py"'),
        ("cannot open '/home/someone/a b', really", "cannot open 'a b', really"),
        ("--home=/home/someone/x", "--home=x"),
        ("https://docs.example/en/latest/x.html", "https://docs.example/en/latest/x.html"),
        ("12/34 checks, a/b", "12/34 checks, a/b"),
    ],
)
def test_folders_are_cut_and_nothing_else(text: str, clean: str) -> None:
    assert without_folders(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "nvcc -I/home/someone/include -c",
        "PATH is /usr/bin:/home/someone/bin",
        "see file:///home/someone/x.html",
    ],
)
def test_folders_are_cut_wherever_they_begin(text: str) -> None:
    assert "someone" not in without_folders(text)


def test_a_tail_is_short_whatever_was_printed() -> None:
    assert tail("\n".join(f"line {n}" for n in range(100))).splitlines()[-1] == "line 99"
    assert len(tail("x" * 100_000)) <= 1200
    assert tail("\n \n") == ""
