"""Which commit a report says it was made by."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbench.cli import options


def test_the_commit_that_is_told_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_git", lambda *_: "of another history")
    monkeypatch.setenv(options.COMMIT, "0123abc")
    assert options.version()["commit"] == "0123abc"
    assert options.version()["dirty"] is None


def test_a_source_tree_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(options.COMMIT, raising=False)
    told = {"rev-parse": "4567def", "status": " M rlbench/plan.py"}
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(options, "_git", lambda _, command, *__: told[command])
    assert options.version()["commit"] == "4567def"
    assert options.version()["dirty"] is True
    told["status"] = ""
    assert options.version()["dirty"] is False
