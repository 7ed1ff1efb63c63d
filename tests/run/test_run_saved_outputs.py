"""What a worker writes is what the safetensors library reads, whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from rlbench.measure.bits import digest
from rlbench.results import atomic
from rlbench.run import tensor_file
from rlbench.run.saved_outputs import SavedOutputs

METADATA = {"engine": 'fa3:splits="1"', "environment": "\u00fc\U0001f600 \\ \x07"}
TENSORS = {
    "prefill.out 3+4": torch.randn(7, 2, 3).to(torch.bfloat16),
    "half": torch.tensor([float("nan"), float("inf"), -0.0, 6e-8], dtype=torch.float16),
    "single": torch.randn(5),
    "odd": torch.tensor([1.5], dtype=torch.bfloat16),
    "double": torch.randn(3, dtype=torch.float64),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "strided": torch.arange(12.0)[::3],
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    'a "name" \n\u2028': torch.ones(1),
}


def test_the_library_reads_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensor_file.write(path, TENSORS, METADATA)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == METADATA
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert digest(read[name]) == digest(tensor)


def test_the_file_is_as_the_library_would_write_it(tmp_path: Path) -> None:
    path = tmp_path / "x"
    tensor_file.write(path, {"a": torch.ones(2, 3)}, {})
    ours, theirs = path.read_bytes(), save({"a": torch.ones(2, 3)})
    length = int.from_bytes(ours[:8], "little")
    assert length % 8 == 0
    assert ours[8 + length :] == theirs[-24:]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device"))])  # fmt: skip
def test_a_kept_tensor_is_a_copy(device: str, tmp_path: Path) -> None:
    buffer = torch.ones(3, device=device)
    saved = SavedOutputs({"path": str(tmp_path / "x"), "metadata": {"engine": "e"}})
    saved.keep("out", buffer)
    buffer.zero_()
    saved.write("0" * 64)
    assert saved.failure is None
    assert load_file(tmp_path / "x")["out"].tolist() == [1, 1, 1]
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert file.metadata() == {"engine": "e", "inputs_sha256": "0" * 64}


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    unasked, empty = SavedOutputs(None), SavedOutputs({"path": "x", "metadata": {}})
    unasked.keep("out", torch.ones(1))
    for saved in (unasked, empty):
        saved.write("0" * 64)
        assert saved.failure is None
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_told_and_raises_nothing(tmp_path: Path) -> None:
    for path, tensor, reason in (
        (tmp_path / "no" / "x", torch.ones(1), "No such file"),
        (tmp_path / "x", torch.ones(1, dtype=torch.int64), "ValueError: out is torch.int64"),
    ):
        saved = SavedOutputs({"path": str(path), "metadata": {}})
        saved.keep("out", tensor)
        saved.write("0" * 64)
        assert saved.failure is not None
        assert reason in saved.failure
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    tensor_file.write(path, {"a": torch.ones(2)}, {})
    before = path.read_bytes()
    write = atomic.write

    def no_room(path: Path, parts: Iterable[bytes | memoryview]) -> None:
        def some() -> Iterable[bytes | memoryview]:
            yield next(iter(parts))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        write(path, some())

    monkeypatch.setattr(atomic, "write", no_room)
    saved = SavedOutputs({"path": str(path), "metadata": {}})
    saved.keep("a", torch.zeros(2))
    saved.write("0" * 64)
    assert saved.failure == "No space left on device"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "fa3.safetensors"
    others = [tmp_path / name for name in ("fa3.safetensors.x", ".fa3:splits=1.safetensors.x")]
    for file in (tmp_path / ".fa3.safetensors.half", *others):
        file.write_text("")
    tensor_file.write(path, {"a": torch.ones(2)}, {})
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])
