"""What is running now and how much is left: a live display, or plain lines where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from rlbench.plan import Job
from rlbench.render import cells
from rlbench.render.view import clean
from rlbench.results.schema import Result
from rlbench.results.vocabulary import Status


@contextmanager
def progress(total: int) -> Iterator[Live | Lines]:
    """A listener for `total` jobs, on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(console, total)
        return
    bar = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    )
    with bar:
        yield Live(bar, total)


class Live:
    """A bar with the job and the check that are running."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def started(self, job: Job) -> None:
        self._bar.update(self._task, description=title(job))

    def told(self, job: Job, text: str) -> None:
        self._bar.update(self._task, description=clean(f"{title(job)}: {text}"))

    def finished(self, job: Job, result: Result) -> None:
        if result.status is not Status.UNAVAILABLE:
            self._bar.console.print(outcome(job, result))
            self._bar.advance(self._task)


class Lines:
    """One line a finished job, for logs."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total, self._done = console, total, 0

    def started(self, job: Job) -> None: ...

    def told(self, job: Job, text: str) -> None: ...

    def finished(self, job: Job, result: Result) -> None:
        if result.status is not Status.UNAVAILABLE:
            self._done += 1
            line = Text(f"[{self._done}/{self._total}] ").append_text(outcome(job, result))
            self._console.print(line, soft_wrap=True)


def title(job: Job) -> str:
    return f"{job.variant.id} · {job.case.id} · {job.scenario}"


def outcome(job: Job, result: Result) -> Text:
    """`engine · case · scenario  pass 9/9  1.2 s`, with the reason if there is one."""
    line = Text(clean(title(job)) + "  ")
    line.append(cells.verdict(result), style=cells.style(result))
    line.append(f"  {result.seconds:.1f} s", style="dim")
    if result.reason:
        line.append(f"  {clean(result.reason)}", style="dim")
    return line
