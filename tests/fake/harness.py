"""Driving `rlbench` as its user does: a process, its output, its report, and what it left behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parent / "plugin"
LONGEST_S = 240.0
MARK = "RLBENCH_TEST_RUN"
SMALL = ("--case", "tiny", "--preset", "smoke", "--device", "cpu")
VOLATILE = {"seconds", "at"}

Json = dict[str, Any]


@dataclass(frozen=True)
class Done:
    """A finished `rlbench`."""

    code: int
    out: str
    err: str
    mark: str
    """What the environment of all its processes held."""

    @property
    def complaints(self) -> list[str]:
        """The lines of standard error that are no progress."""
        return [line for line in self.err.splitlines() if not line.startswith("[")]


@dataclass(frozen=True)
class Rlbench:
    """`rlbench` in a folder of its own, with the fake engines installed."""

    folder: Path
    python: str = sys.executable
    extra: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str | Path, code: int | None = None, **extra: str) -> Done:
        """Run it to its end; `code` is the exit code that it must have."""
        process = self.start(*arguments, **extra)
        return self.finish(process, code=code)

    def start(
        self, *arguments: str | Path, command: Sequence[str] = ("-m", "rlbench"), **extra: str
    ) -> Started:
        """Start it."""
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [self.python, *command, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment(mark, extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        return Started(process, mark)

    def environment(self, mark: str, extra: Mapping[str, str]) -> dict[str, str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith("RLBENCH_")}
        return {
            **variables,
            # Two processes with a thread a core each slow one another down a hundredfold.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "COLUMNS": "200",
            "PYTHONPATH": str(PLUGIN),
            MARK: mark,
            **self.extra,
            **extra,
        }

    def finish(self, started: Started, *, code: int | None = None) -> Done:
        """Wait for it."""
        try:
            out, err = started.process.communicate(timeout=LONGEST_S)
        except BaseException:
            started.process.kill()
            started.process.communicate()
            raise
        done = Done(started.process.returncode, out, err, started.mark)
        assert code in {None, done.code}, f"exit code {done.code}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return done

    def files(self) -> list[str]:
        """The names of what is in the folder, sorted."""
        return sorted(path.name for path in self.folder.iterdir())

    def report(self, name: str) -> Json:
        """A report in the folder."""
        return read(self.folder / name)


@dataclass(frozen=True)
class Started:
    """A running `rlbench`."""

    process: subprocess.Popen[str]
    mark: str

    def lines_until(self, start: str) -> Iterator[str]:
        """Lines of its standard error up to the one that begins with `start`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            yield line
            if line.startswith(start):
                return
        raise AssertionError(f"ended before it said {start!r}")


def read(path: Path) -> Json:
    """A report, as strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in {path.name}")

    data: Json = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    return data


def by_key(report: Json) -> dict[tuple[str, str], Json]:
    """(engine, scenario) -> result."""
    return {(r["engine"], r["scenario"]): r for r in report["results"]}


def settled(report: Json) -> Json:
    """A report without what every run measures anew."""
    out = {k: v for k, v in report.items() if k not in {"created", "argv", "runs"}}
    out["environments"] = [{**e, "probes": None} for e in report["environments"]]
    out["results"] = [
        {k: v for k, v in r.items() if k not in VOLATILE and k != "points"}
        for r in report["results"]
    ]
    return out


def alive(mark: str, patience_s: float = 5.0) -> list[int]:
    """The processes of a run that outlive it (a killed one may take a moment to be gone)."""
    found = []
    for pid in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        try:
            if f"{MARK}={mark}".encode() not in Path(f"/proc/{pid}/environ").read_bytes():
                continue
            handle = os.pidfd_open(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        ended, _, _ = select.select([handle], [], [], patience_s)
        os.close(handle)
        if not ended:
            found.append(pid)
    return found
