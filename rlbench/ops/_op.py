"""The contract of an operation: what engines, scenarios and the command line may know of it.

An op is described twice. `Op` is plain data the parent process reads without importing torch;
`Workload`, made by `Op.load` inside a worker, holds tensors and is what scenarios talk to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlbench.errors import Unsupported, unknown
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    import torch

DTYPES = ("bf16", "fp16")
PRESETS = ("smoke", "default", "full")
SEED = 20261130
"""All inputs of all ops are drawn from it; it is part of every case in a report."""

Outputs = dict[str, "torch.Tensor"]
Run = Callable[[], Outputs]
"""Launches the bound computation and returns its outputs, by tensor name."""


class Call(Protocol):
    """One use of one entry point: the tensors and sizes an engine is handed."""

    entry: ClassVar[str]
    """The engine function this call is for, e.g. `prefill`, `paged-prefill`, `decode`."""

    @property
    def output_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What an engine must return: tensor name -> shape."""
        ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """What of it an engine may choose its path by: `sequences`, `max_seqlen_q` …"""
        ...


def whole_outputs(call: Call, outputs: Outputs) -> Outputs:
    """The outputs, all of them there: an answer that is missing would equal any other one.

    Raises ValueError for a tensor that is missing or has another shape.
    """
    for name, shape in call.output_shapes.items():
        got = tuple(outputs[name].shape) if name in outputs else None
        if got != shape:
            raise ValueError(f"the engine's {name!r} should have shape {shape}, it has {got}")
    return outputs


@dataclass(frozen=True)
class Kernel:
    """What an engine's loader returns for an op: one binder an entry point.

    A binder takes a `Call` and returns a `Run`. Binding may do what the engine does once a batch
    (planning, workspace, for a backward the forward before it); whatever touches the data at
    every step belongs into the `Run`, because that is what is timed.
    """

    entries: Mapping[str, Callable[[Any], Run]]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Entry points the engine does not offer, each with its reason."""
    resolved: Mapping[str, str] = field(default_factory=dict)
    """What the engine settled on, as far as it can be known: backend, number of splits …

    It is read after each job, so a call may add what only it can tell. A key keeps its value:
    reports that disagree on one cannot be merged.
    """

    def bind(self, call: Call) -> Run:
        """Prepare `call`. Raises Unsupported, with the reason, where the engine has no such entry."""
        if call.entry not in self.entries:
            raise Unsupported(self.unsupported.get(call.entry, f"offers no {call.entry}"))
        return self.entries[call.entry](call)


@dataclass(frozen=True)
class Part:
    """One call of a trial, and what of its outputs counts."""

    call: Call
    take: Callable[[Outputs], Outputs]


@dataclass(frozen=True)
class Trial:
    """Calls whose taken outputs, joined along the first dimension, are one answer.

    `parts` builds its tensors when iterated, so that a list of trials costs no memory.
    """

    parts: Callable[[], Iterator[Part]]
    fresh_process: bool = False
    """Run it in another process than the one measuring."""


@dataclass(frozen=True)
class Variation:
    """One changed circumstance: `actual` must have the bits of `expected`."""

    name: str
    pass_: str
    property: Property
    expected: Trial
    actual: Trial


@dataclass(frozen=True)
class Exam:
    """One accuracy question: a call, its fp64 answer, and plain torch's answer at its dtype."""

    pass_: str
    label: str
    call: Call
    reference: Callable[[], Outputs]
    plain: Callable[[], Outputs]


@dataclass(frozen=True)
class Point:
    """One latency question."""

    pass_: str
    shape: str
    """Sizes in words that sort and compare: `1x8192`, `16 seqs, context 8192`."""
    call: Callable[[], Call]
    flops: float
    """Floating-point operations of the mathematical definition, masked pairs not counted."""
    bytes: float
    """Bytes that must cross device memory: every input once, every output once."""
    bound: str
    """`compute` or `memory`: which ceiling the point is held against."""
    launch_bound: bool = False
    """Short enough that launching dominates: timed by replaying a CUDA graph where possible."""


class Workload(Protocol):
    """A case's tensors and questions, on a device."""

    def fingerprint(self) -> str:
        """SHA-256 of the watched inputs' bytes; equal everywhere or nothing may be compared."""

    def variations(self, scenario: str) -> Iterator[Variation]: ...

    def exams(self) -> Iterator[Exam]: ...

    def points(self) -> Iterator[Point]: ...


@dataclass(frozen=True)
class Case:
    """One model's shape at one dtype."""

    name: str
    dtype: str
    params: Mapping[str, Any]

    @property
    def id(self) -> str:
        """`qwen3-next` at bf16, `qwen3-next:fp16` otherwise."""
        return self.name if self.dtype == DTYPES[0] else f"{self.name}:{self.dtype}"


@dataclass(frozen=True)
class Op:
    """An operation, as data."""

    name: str
    summary: str
    passes: tuple[str, ...]
    scenarios: Mapping[str, tuple[str, ...]]
    """The scenarios that make sense for this op, each with the passes it exercises."""
    models: Mapping[str, Mapping[str, Any]]
    """Case name -> shape parameters."""
    default_cases: Mapping[str, tuple[str, ...]]
    """Device type (`cpu`, `cuda`) -> the cases a plain run measures."""
    load: Callable[[Case, str, str], Workload]
    """(case, preset, device) -> workload; the only function here that may import torch."""
    dtypes: tuple[str, ...] = DTYPES
    """Those it can be asked at, the usual one first."""

    def case(self, name: str, dtype: str) -> Case:
        """The case of that name. Raises UsageError, listing the known ones."""
        if name not in self.models:
            raise unknown("--case", name, self.models)
        return Case(name, dtype, self.models[name])
