"""Reports on disk: each way a file can be wrong, and that none is ever lost."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rlbench.errors import ReportError
from rlbench.results import store
from rlbench.results.schema import Report
from rlbench.results.vocabulary import SCHEMA


def data(**fields: Any) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "created": "2026-01-01T00:00:00.000Z",
        "argv": ["rlbench"],
        "rlbench": {"version": "0.1.0", "commit": None, "dirty": None},
        **fields,
    }


def report(**fields: Any) -> Report:
    return Report.model_validate(data(**fields))


def test_saved_report_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    store.save(report(new="μ"), path)
    assert json.loads(path.read_text(encoding="utf-8")) == data(new="μ")
    assert store.load(path) == report(new="μ")
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"], "no temporary file is left"


def test_saved_report_has_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        store.save(report(), tmp_path / "r.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "r.json").stat().st_mode) == 0o640


WRONG = {
    "not JSON": ("{'a': 1}", "is not JSON"),
    "cut off": (json.dumps(data())[:-20], "looks cut off"),
    "empty": ("", "is not JSON"),
    "NaN": (json.dumps(data(x=float("nan"))), "NaN is not strict JSON"),
    "infinity": ('{"schema": -Infinity}', "-Infinity is not strict JSON"),
    "a list": ("[1, 2]", "no `schema` field"),
    "no schema": ('{"a": 1}', "no `schema` field"),
    "another schema": ('{"schema": "rlbench.report/2"}', "has schema 'rlbench.report/2'"),
    "a field missing": (json.dumps({"schema": SCHEMA}), "created: Field required"),
    "a field of another type": (json.dumps(data(results=[3])), "results.0"),
    "deep nesting": ("[" * 100_000 + "]" * 100_000, "nested too deep"),
    "a huge number": ('{"schema": ' + "9" * 5000 + "}", "is not JSON"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_content_is_one_line_with_file_and_reason(what: str, tmp_path: Path) -> None:
    text, reason = WRONG[what]
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ReportError) as caught:
        store.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert reason in message
    assert "\n" not in message
    assert len(message) < 600


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="is a directory"):
        store.load(tmp_path)
    with pytest.raises(ReportError, match="there is no such file"):
        store.load(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'{"schema": "\xe9"}')
    with pytest.raises(ReportError, match="cannot be read"):
        store.load(tmp_path / "latin.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    with pytest.raises(ReportError, match=r"loop\.json: "):
        store.load(tmp_path / "loop.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    store.save(report(), path)
    path.chmod(0)
    with pytest.raises(ReportError, match="cannot be read"):
        store.load(path)


def test_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    store.save(report(), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match=r"r\.json: cannot be written: No space left on device"):
        store.save(report(new=1), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_interrupted_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    store.save(report(), path)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        store.save(report(new=1), path)
    assert store.load(path) == report()
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_writing_into_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot be written"):
        store.save(report(), tmp_path / "absent" / "r.json")
    with pytest.raises(ReportError, match=r"there is no directory .*absent; create it"):
        store.check_writable(tmp_path / "absent" / "r.json")
    with pytest.raises(ReportError, match="is a directory"):
        store.check_writable(tmp_path)
    store.check_writable(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == [], "asking leaves nothing"


def test_earlier_report_is_kept_under_the_next_free_number(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert store.keep_earlier(path) is None
    for number in (2, 3, 4):
        path.write_text(str(number))
        assert store.keep_earlier(path) == tmp_path / f"r.{number}.json"
        assert not path.exists()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "r.2.json": "2",
        "r.3.json": "3",
        "r.4.json": "4",
    }


def test_report_that_cannot_be_written_is_rescued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = store.rescue(report(new=1), Path("/nowhere/r.json"))
    assert Path(place).parent == tmp_path
    assert store.load(Path(place)) == report(new=1)


def test_report_that_can_be_written_nowhere_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    assert store.rescue(report(new=1), Path("/nowhere/r.json")) == "standard output"
    assert json.loads(capsys.readouterr().out) == data(new=1)
