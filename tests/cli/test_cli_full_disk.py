"""A disk that is full costs no measurement: the report goes elsewhere, and the exit code says so."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from harness import SMALL, Json, Rlbench, by_key

from rlbench.results import store
from rlbench.run.recorder import Recorder

RUN = ("attention", *SMALL, "--only", "fake", "--scenario", "batch", "--skip", "control")
FULL_AT = """
import errno, os, sys
from pathlib import Path
from rlbench.results import store
write, left = store._write, [int(sys.argv.pop(1))]
def limited(text, path):
    if path.name == "r.json":
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write(text, path)
store._write = limited
from rlbench.cli import main
main()
"""
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
from rlbench.cli import main
main()
"""


def test_a_report_that_finds_no_room_is_rescued(rlbench: Rlbench) -> None:
    (rlbench.folder / "tmp").mkdir()
    started = rlbench.start(
        "1", *RUN, "--out", "r.json", command=("-c", FULL_AT), TMPDIR=str(rlbench.folder / "tmp")
    )
    done = rlbench.finish(started)
    (rescued,) = (rlbench.folder / "tmp").iterdir()
    assert str(rescued) in done.err
    assert "No space left on device" in done.err
    assert len(done.complaints) == 1
    report = json.loads(rescued.read_text())
    assert set(by_key(report)) == {("fake", "batch")}
    # What was there before the disk was full is there still, and whole.
    assert rlbench.report("r.json")["results"] == []
    assert done.code == 2
    assert rlbench.files() == ["r.json", "tmp"]


def test_a_disk_with_room_again_has_the_whole_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = {"version": "0", "commit": None, "dirty": None}
    out = tmp_path / "r.json"
    recorder = Recorder(out, {"created": "", "argv": [], "rlbench": version}, "smoke")
    with monkeypatch.context() as full:

        def no_room(text: str, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(store, "_write", no_room)
        recorder.save()
        assert "No space left" in str(recorder.write_error)
        assert not out.exists()
    recorder.save()
    assert recorder.write_error is None
    assert store.load(out) == recorder.report()


def test_where_no_file_can_be_written_the_report_is_printed(rlbench: Rlbench) -> None:
    started = rlbench.start(
        *RUN, "--out", "r.json", command=("-c", LIMITED), PYTHONDONTWRITEBYTECODE="1"
    )
    done = rlbench.finish(started)
    assert len(done.complaints) == 1
    assert "standard output" in done.err
    assert by_key(_printed(done.out))["fake", "batch"]["status"] == "unproven"
    assert done.code == 2
    assert not [name for name in rlbench.files() if name != "r.json"]


def test_a_merge_that_finds_no_room_keeps_the_earlier_file(rlbench: Rlbench) -> None:
    good = {"created": "", "argv": [], "rlbench": {"version": "", "commit": None, "dirty": None}}
    text = json.dumps({"schema": "rlbench.report/1", **good})
    (rlbench.folder / "a.json").write_text(text)
    (rlbench.folder / "r.json").write_text(text)
    started = rlbench.start("0", "merge", "a.json", "-o", "r.json", command=("-c", FULL_AT))
    done = rlbench.finish(started, code=2)
    assert "No space left on device" in done.err
    kept = {name: (rlbench.folder / name).read_text() for name in rlbench.files()}
    assert list(kept.values()).count(text) == len(kept) == 2


def _printed(out: str) -> Json:
    """The report within what was printed."""
    begin = out.index('{\n "schema"')
    report: Json
    report, _ = json.JSONDecoder().raw_decode(out[begin:])
    return report
