"""The report, `rlbench.report/1`, as pydantic models: the source of `rlbench schema`.

Unknown fields are kept, so that a merge by an older version loses nothing of a newer report.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlbench.results.vocabulary import ANSWERED, Property, Status


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("strict JSON has no NaN and no infinity")
    return value


Number = Annotated[float, AfterValidator(_finite)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True, frozen=True)


class Version(_Model):
    """The rlbench that measured."""

    version: str
    commit: str | None = Field(description="git commit of the source tree, if it is one")
    dirty: bool | None = Field(description="whether that tree had uncommitted changes")


class RunInfo(_Model):
    """One invocation that contributed to the report."""

    created: str = Field(description="UTC, ISO 8601")
    argv: list[str] = Field(description="the command line; folders of the machine are left out")
    rlbench: Version


class Device(_Model):
    """What the engines ran on."""

    name: str
    compute_capability: tuple[int, int] | None = None
    sms: int | None = Field(default=None, description="streaming multiprocessors")
    memory: int | None = Field(default=None, description="bytes")
    driver: str | None = None
    cuda: str | None = None


class Probe(_Model):
    """This device's ceilings, measured by a worker before and after its jobs."""

    engine: str
    when: Literal["before", "after"]
    at: str
    tflops: Number = Field(description="a fixed matrix product")
    gbps: Number = Field(description="a fixed copy, bytes read plus bytes written")


class Environment(_Model):
    """One interpreter with its packages, and the device it used."""

    id: str
    python: str
    packages: dict[str, str]
    device: Device
    probes: list[Probe] = []


class Claim(_Model):
    """What an engine's makers promise."""

    property: Property
    source: str


class Engine(_Model):
    """An engine in the environment that ran it."""

    id: str
    environment: str
    claims: list[Claim] = []
    resolved: dict[str, str] = Field(default={}, description="backend, number of splits …")


class Case(_Model):
    """One model's shape at one dtype, and the bits of its inputs."""

    op: str
    id: str
    params: dict[str, Any]
    dtype: str
    inputs_sha256: Sha256


class First(_Model):
    """The first differing element; values as `decimal (0xbits)`."""

    tensor: str
    index: list[int]
    expected: str
    got: str


class Check(_Model):
    """One variation: the same rows under one changed circumstance, compared bit by bit."""

    variation: str
    pass_: str = Field(alias="pass")
    property: Property
    exercised: str | None = Field(
        default=None, description="the varied side's calls and sizes, by which engines choose"
    )
    equal: bool
    elements: int
    differing: int
    max_ulp: int = Field(description="largest distance in representable values")
    nans: int = Field(description="NaN elements in the varied output")
    first: First | None
    proven: bool = Field(description="the control's bits differed in this very check")


class Skipped(_Model):
    """A question the engine does not take, and why."""

    variation: str
    reason: str


class Errors(_Model):
    """Distance of one output tensor from fp64; None where an output is not finite."""

    max_abs: Number | None
    mean_abs: Number | None
    rel_rms: Number | None = Field(description="norm of the error over norm of the reference")
    ulp_p50: int | None
    ulp_p99: int | None
    ulp_max: int | None
    ratio_to_torch: Number | None = Field(description="rel_rms over that of plain torch")
    nonfinite: int = 0


class Point(_Model):
    """The latency of one call."""

    pass_: str = Field(alias="pass")
    shape: str
    timer: Literal["cuda-graph", "cuda-events", "wall-clock"]
    timer_note: str | None = None
    median_us: Number
    p10_us: Number
    p90_us: Number
    repeats: int
    cv: Number = Field(description="standard deviation over mean")
    tflops: Number | None = None
    gbps: Number | None = None
    percent_of_ceiling: Number = Field(description="of the ceiling this worker measured itself")
    kernels: list[str] = Field(default=[], description="device kernels of one call")


class Result(_Model):
    """The answer for one (op, case, engine, environment, scenario)."""

    op: str
    case: str
    engine: str
    environment: str
    scenario: str
    status: Status
    reason: str | None = Field(default=None, description="exactly when nothing was measured")
    output: str | None = Field(default=None, description="last lines a broken worker printed")
    command: str
    seconds: Number
    at: str = Field(description="UTC, ISO 8601")
    checks: list[Check] | None = None
    skipped: list[Skipped] | None = None
    digests: dict[str, Sha256] | None = Field(default=None, description="SHA-256 of outputs")
    errors: dict[str, Errors] | None = None
    points: list[Point] | None = None

    @model_validator(mode="after")
    def _reason_or_measurement(self) -> Result:
        measured = self.checks or self.errors or self.points
        if (self.status in ANSWERED) != bool(measured):
            raise ValueError(f"status {self.status.value!r} and the measurements disagree")
        if (self.reason is None) != (self.status in ANSWERED):
            raise ValueError(f"status {self.status.value!r} and the reason disagree")
        return self

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return (self.op, self.case, self.engine, self.environment, self.scenario)


class Report(_Model):
    """Everything one run, or several merged ones, measured."""

    schema_: Literal["rlbench.report/1"] = Field(alias="schema")
    created: str
    argv: list[str]
    rlbench: Version
    runs: list[RunInfo] = Field(default=[], description="every run that was merged into this")
    environments: list[Environment] = []
    engines: list[Engine] = []
    cases: list[Case] = []
    results: list[Result] = []
