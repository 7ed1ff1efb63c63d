"""Saved outputs that are not what the report measured are named and not compared."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "render"))

from sample_report import errors, report, result

from rlbench.differences import Differences, measure
from rlbench.errors import UsageError
from rlbench.measure.bits import digest
from rlbench.results.output_files import file_name
from rlbench.results.schema import Report
from rlbench.run import tensor_file

OUT, GRAD = "prefill.out 3", "backward.dq 3"
ONE = {OUT: torch.tensor([1.0, 2.0, 3.0]), GRAD: torch.tensor([1.0, 1.0, 1.0])}
OTHER = {OUT: torch.tensor([1.0, 2.5, 3.0]), GRAD: torch.tensor([1.0, 1.0, 1.0])}
Tensors = dict[str, torch.Tensor]


def answer(engine: str, tensors: Tensors, environment: str = "local") -> dict[str, object]:
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    figures = dict.fromkeys(tensors, errors())
    return result(engine, "accuracy", "measured", environment, errors=figures, digests=digests)


def save(
    folder: Path,
    engine: str,
    tensors: Tensors,
    environment: str = "local",
    says: dict[str, str] | None = None,
) -> Path:
    metadata = {"op": "attention", "case": "qwen3-next", "engine": engine}
    metadata |= {"environment": environment, "inputs_sha256": "0" * 64, **(says or {})}
    path = folder / file_name("attention", "qwen3-next", engine, environment)
    tensor_file.write(path, tensors, metadata)
    return path


@pytest.fixture
def two() -> Report:
    return report([answer("fa3", ONE), answer("fa4", OTHER)])


def apart(found: Differences) -> list[tuple[float, float]]:
    return [(d.largest, d.mean) for d in found.pairs.values()]


def test_unequal_tensors_have_their_differences_and_equal_ones_need_none(
    two: Report, tmp_path: Path
) -> None:
    save(tmp_path, "fa3", ONE)
    save(tmp_path, "fa4", OTHER)
    found = measure(two, [tmp_path])
    assert found.refused == []
    assert found.unsaved == set()
    assert set(found.pairs) == {frozenset((digest(ONE[OUT]), digest(OTHER[OUT])))}
    assert apart(found) == [(0.5, 0.5 / 3)]


def test_folders_of_several_environments_are_compared_together(tmp_path: Path) -> None:
    made = report([answer("fa3", ONE, "local"), answer("fa3", OTHER, "vllm")])
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, tensors, environment in zip(folders, (ONE, OTHER), ("local", "vllm"), strict=True):
        folder.mkdir()
        save(folder, "fa3", tensors, environment)
    found = measure(made, folders)
    assert len(found.pairs) == 1
    assert measure(made, folders[:1]).unsaved == {
        ("attention", "qwen3-next", "fa3", "vllm", "accuracy")
    }


def test_engines_of_equal_bits_are_read_once_and_one_may_lack_its_file(tmp_path: Path) -> None:
    made = report([answer("fa2", ONE), answer("fa3", ONE), answer("fa4", OTHER)])
    save(tmp_path, "fa3", ONE)
    save(tmp_path, "fa4", OTHER)
    found = measure(made, [tmp_path])
    assert len(found.pairs) == 1
    assert {key[2] for key in found.unsaved} == {"fa2"}


def test_a_good_file_in_one_folder_makes_up_for_a_bad_one_in_another(
    two: Report, tmp_path: Path
) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    for folder in (bad, good):
        folder.mkdir()
    save(bad, "fa3", OTHER)
    save(good, "fa3", ONE)
    save(good, "fa4", OTHER)
    found = measure(two, [bad, good])
    assert apart(found) == [(0.5, 0.5 / 3)]
    (line,) = found.refused
    assert "another run's" in line and OUT in line and GRAD not in line


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def with_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def with_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def bit_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (cut, "no safetensors file, or not all of one"),
    "empty": (lambda path: path.write_bytes(b""), "no safetensors file"),
    "text": (lambda path: path.write_text("hello, world" * 9), "no safetensors file"),
    "huge header": (lambda path: path.write_bytes(b"\xff" * 64), "no safetensors file"),
    "fifo": (with_fifo, "is not a file"),
    "folder": (with_folder, "is not a file"),
    "dangling link": (dangling, "is not a file"),
    "changed": (bit_flipped, "another run's"),
    "other engine": (lambda p: save(p.parent, "fa3", ONE, says={"engine": "fa9"}), "engine 'fa9'"),
    "other inputs": (
        lambda p: save(p.parent, "fa3", ONE, says={"inputs_sha256": "1" * 64}),
        "inputs_sha256",
    ),
    "no metadata": (lambda p: tensor_file.write(p, ONE, {}), "op None"),
    "no tensors": (lambda p: save(p.parent, "fa3", {}), "is missing"),
    "other dtype": (
        lambda p: p.write_bytes(p.read_bytes().replace(b'"F32"', b'"I32"')),
        "is torch.int32",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_refused_by_name(what: str, two: Report, tmp_path: Path) -> None:
    path = save(tmp_path, "fa3", {OUT: ONE[OUT], GRAD: ONE[GRAD]})
    save(tmp_path, "fa4", OTHER)
    spoil, says = BAD[what]
    spoil(path)
    found = measure(two, [tmp_path])
    (line,) = found.refused
    assert str(path) in line
    assert says in line
    assert apart(found) == [] or what == "changed"
    if what != "changed":
        assert {key[2] for key in found.unsaved} == {"fa3"}


def test_the_same_bytes_in_another_shape_are_refused(two: Report, tmp_path: Path) -> None:
    save(tmp_path, "fa3", ONE)
    path = save(tmp_path, "fa4", {**OTHER, OUT: OTHER[OUT].reshape(3, 1)})
    found = measure(two, [tmp_path])
    assert found.refused == [f"{path}: {OUT} has shape [3, 1], others [3]"]
    assert apart(found) == []


def test_a_folder_that_is_none_is_an_error(two: Report, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--outputs: .*nowhere is not a directory"):
        measure(two, [tmp_path / "nowhere"])


def test_an_empty_folder_lacks_everyone(two: Report, tmp_path: Path) -> None:
    found = measure(two, [tmp_path])
    assert {key[2] for key in found.unsaved} == {"fa3", "fa4"}
    assert (found.pairs, found.refused) == ({}, [])
