"""Adding to a file of environments: what is in it stays, whatever it looks like."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from rlbench.envs import listing, toml
from rlbench.errors import BuildError, UsageError
from rlbench.run.interpreters import Interpreter, from_file


def interpreter(folder: Path) -> Path:
    """An environment's Python."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    return python


def test_new_file_is_what_the_reader_wants(tmp_path: Path) -> None:
    path, python = tmp_path / "envs.toml", interpreter(tmp_path / "e" / "vllm")
    listing.check(path)
    assert listing.add(path, "vllm", python, ["torch-eager"])
    assert from_file(path) == [Interpreter("vllm", str(python), ("torch-eager",))]
    assert 'python = "e/vllm/bin/python"' in path.read_text()
    assert path.read_text().startswith("# ")


EDITED = {
    "comment": "# mine\n[a]\npython = 'p' # here\n",
    "no end of line": "[a]\npython = 'p'",
    "Windows": "[a]\r\npython = 'p'\r\n",
    "empty": "",
    "open table": "[a]\npython = 'p'\n[a.more]\nx = 1\n",
}


@pytest.mark.parametrize("edited", EDITED)
def test_what_a_user_wrote_stays(edited: str, tmp_path: Path) -> None:
    path, text = tmp_path / "envs.toml", EDITED[edited].encode()
    path.write_bytes(text)
    assert listing.add(path, "vllm", interpreter(tmp_path / "vllm"), [])
    assert path.read_bytes().startswith(text)
    found = toml.tables("", path)
    assert found.pop("vllm") == {"python": "vllm/bin/python"}
    assert found == toml.parse("", text.decode())


@pytest.mark.parametrize("text", ["[vllm]\npython = 'p'\n", "vllm.python = 'p'\n", "vllm = 1\n"])
def test_table_of_that_name_stays(text: str, tmp_path: Path) -> None:
    path = tmp_path / "envs.toml"
    path.write_text(text)
    assert not listing.add(path, "vllm", Path("/elsewhere/python"), ["fa2*"])
    assert path.read_text() == text


@pytest.mark.parametrize("folder", ["a b", 'a"b', "a\\b", "ü€", "a#[x]"])
def test_any_folder_can_be_named(folder: str, tmp_path: Path) -> None:
    path, python = tmp_path / "envs.toml", interpreter(tmp_path / folder / "v")
    listing.add(path, "v", python, [])
    assert [i.python for i in from_file(path)] == [str(python)]


def test_interpreter_outside_is_named_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    python = interpreter(tmp_path / "there")
    listing.add(Path("envs.toml"), "v", Path("../there/bin/python"), [])
    assert [i.python for i in from_file(Path("envs.toml"))] == [str(python)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("envs.toml", b"[a", "is not TOML"),
        ("envs.toml", b"\xff", "cannot be read"),
        ("no/envs.toml", None, "cannot be written"),
    ],
)
def test_file_that_cannot_be_added_to_is_refused_beforehand(
    name: str, text: bytes | None, says: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(UsageError, match=says):
        listing.check(path)


def test_entry_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "envs.toml"
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(BuildError, match=r"cannot be written(.|\n)*\[v\]\npython = "):
        listing.add(path, "v", Path("/p/python"), [])
