"""How far apart engines' outputs are, from the files that `--save-outputs` wrote.

The files are not trusted: a tensor counts only if its bytes have the digest that the report names
for it. Here, and nowhere else, a parent imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path

import torch
from safetensors import safe_open

from rlbench.errors import UsageError
from rlbench.measure import pairwise
from rlbench.measure.bits import digest
from rlbench.results.output_files import file_name
from rlbench.results.schema import Report, Result
from rlbench.run.tensor_file import DTYPES

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, torch.Size]


@dataclass(frozen=True)
class Difference:
    """Of two tensors, absolute, in fp64; NaN where some element is not finite."""

    largest: float
    mean: float


@dataclass
class Differences:
    """What was found. Tensors go by their digests, which are the same wherever bits are."""

    pairs: dict[frozenset[str], Difference] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """The digests of the tensors that were read."""
    unsaved: set[tuple[str, str, str, str, str]] = field(default_factory=set)
    """Keys of the results of whose outputs none could be read."""
    refused: list[str] = field(default_factory=list)
    """A line for each file that was not taken, or not whole: its name and the reason."""


class Refused(Exception):
    """A file is not what the report calls for; the text says why."""


def measure(report: Report, folders: Sequence[Path]) -> Differences:
    """The difference of every two tensors of unequal bits that answer the same question.

    Raises UsageError for a folder that is none.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--outputs: {folder} is not a directory")
    inputs = {(case.op, case.id): case.inputs_sha256 for case in report.cases}
    found = Differences()
    saved = sorted((r for r in report.results if r.errors and r.digests), key=lambda r: r.key)
    for case, results in groupby(saved, key=lambda r: (r.op, r.case)):
        answers: dict[str, Tensors] = {}
        shapes: Shapes = {}
        for result in results:
            tensors = _read(result, inputs.get(case), folders, shapes, found.refused)
            for name, tensor in tensors.items():
                answers.setdefault(name, {}).setdefault((result.digests or {})[name], tensor)
            if not tensors:
                found.unsaved.add(result.key)
        for by_digest in answers.values():
            found.read |= by_digest.keys()
            found.pairs |= _pairs(by_digest)
    return found


def _pairs(by_digest: Tensors) -> dict[frozenset[str], Difference]:
    largest, mean = pairwise.differences(list(by_digest.values()))
    numbered = combinations(enumerate(by_digest), 2)
    return {
        frozenset((one, other)): Difference(float(largest[i, j]), float(mean[i, j]))
        for (i, one), (j, other) in numbered
    }


def _read(
    result: Result,
    inputs_sha256: str | None,
    folders: Sequence[Path],
    shapes: Shapes,
    refused: list[str],
) -> Tensors:
    """The tensors of one result that its files in any of the folders really hold."""
    tensors: Tensors = {}
    for folder in folders:
        path = folder / file_name(result.op, result.case, result.engine, result.environment)
        if not os.path.lexists(path):
            continue
        try:
            whole = _open(path, result, inputs_sha256)
        except Refused as why:
            refused.append(f"{path}: {why}")
            continue
        good, wrong = _sift(whole, result.digests or {}, shapes)
        tensors = {**good, **tensors}
        if wrong:
            refused.append(f"{path}: " + "; ".join(wrong))
    return tensors


def _open(path: Path, result: Result, inputs_sha256: str | None) -> Tensors:
    """All tensors of a file. Raises Refused if it is not whole, or another result's."""
    if not path.is_file():
        raise Refused("is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            says = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as why:
        raise Refused(f"cannot be read: {why.strerror or why}") from None
    except Exception as why:  # the library and torch have many
        raise Refused(f"is no safetensors file, or not all of one: {why}") from None
    expected = {
        "op": result.op,
        "case": result.case,
        "engine": result.engine,
        "environment": result.environment,
        "inputs_sha256": inputs_sha256,
    }
    for key, value in expected.items():
        if value is not None and says.get(key) != value:
            raise Refused(f"holds the outputs of {key} {says.get(key)!r}, not {value!r}")
    return tensors


def _sift(tensors: Tensors, digests: dict[str, str], shapes: Shapes) -> tuple[Tensors, list[str]]:
    """The tensors that the report names, and what is wrong with the others."""
    good: Tensors = {}
    wrong: list[str] = []
    strangers = []
    for name, expected in digests.items():
        tensor = tensors.get(name)
        if tensor is None:
            wrong.append(f"{name} is missing")
        elif tensor.dtype not in DTYPES:
            wrong.append(f"{name} is {tensor.dtype}")
        elif digest(tensor) != expected:
            strangers.append(name)
        elif tensor.shape != shapes.setdefault(name, tensor.shape):
            wrong.append(f"{name} has shape {list(tensor.shape)}, others {list(shapes[name])}")
        else:
            good[name] = tensor
    if strangers:
        wrong.append(f"another run's, for the report has other digests: {', '.join(strangers)}")
    return good, wrong
