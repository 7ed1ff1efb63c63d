"""Names of saved outputs: safe for any engine and environment, and readable back."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.errors import UsageError
from rlbench.results import output_files
from rlbench.results.output_files import file_name, parts_of, prepare

ANY = st.text(alphabet=st.characters(exclude_categories=()), min_size=1)


@given(st.tuples(ANY, ANY, ANY, ANY))
def test_any_name_is_a_plain_file_name_and_comes_back(parts: tuple[str, str, str, str]) -> None:
    name = file_name(*parts)
    assert re.fullmatch(r"[A-Za-z0-9_.~=%+-]+\.safetensors", name)
    assert parts_of(name) == parts


def test_names_of_engines_stay_readable() -> None:
    name = file_name("attention", "qwen3-8b:fp16", "torch-sdpa:backend=flash", "../my env")
    assert name == (
        "attention+qwen3-8b%3Afp16+torch-sdpa%3Abackend=flash+..%2Fmy%20env.safetensors"
    )


def test_a_folder_is_made(tmp_path: Path) -> None:
    prepare(tmp_path / "a" / "b", ["x"])
    prepare(tmp_path / "a" / "b", ["x"])
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_place_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(UsageError, match=r"--save-outputs: .*file.* is not a directory"):
            prepare(folder, [])
    with pytest.raises(UsageError, match="--save-outputs: cannot write in /proc/outputs"):
        prepare(Path("/proc/outputs"), [])


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    name = file_name("attention", "tiny", "fake", "é" * 60)
    assert len(os.fsencode(name)) > output_files._LONGEST
    with pytest.raises(UsageError, match="too long"):
        prepare(tmp_path / "new", [name])
    assert not (tmp_path / "new").exists()
