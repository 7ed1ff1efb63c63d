"""`rlbench attention` and the other ops: plan, measure, save, show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlbench import discover

if TYPE_CHECKING:
    from rlbench.plan import Plan
    from rlbench.results.schema import Report
    from rlbench.run.recorder import Recorder
    from rlbench.run.saving import Destination

Names = list[str]


def run(
    context: typer.Context,
    only: Annotated[
        Names,
        typer.Option("--only", help="Engine by id, by name for all its options, or as in 'fa3*'."),
    ] = [],  # noqa: B006  # typer copies it
    skip: Annotated[Names, typer.Option("--skip", help="Engine to leave out.")] = [],  # noqa: B006
    scenario: Annotated[Names, typer.Option("--scenario", help="Scenario to run.")] = [],  # noqa: B006
    case: Annotated[Names, typer.Option("--case", help="Model shape to measure.")] = [],  # noqa: B006
    pass_: Annotated[Names, typer.Option("--pass", help="Pass to measure.")] = [],  # noqa: B006
    dtype: Annotated[
        Names, typer.Option("--dtype", help="bf16 (default), fp16, or fp32 where an op has it.")
    ] = [],  # noqa: B006
    preset: Annotated[
        str, typer.Option(help="How much to ask: smoke, default or full.")
    ] = "default",
    device: Annotated[
        str, typer.Option(help="cpu or cuda:N; the first GPU if there is one.")
    ] = "auto",
    env: Annotated[
        Names,
        typer.Option("--env", metavar="NAME=PYTHON", help="Also run engines in this interpreter."),
    ] = [],  # noqa: B006
    envs: Annotated[
        Path | None, typer.Option("--envs", help="TOML file of interpreters and their engines.")
    ] = None,
    merge: Annotated[
        list[Path], typer.Option("--merge", help="Fold this earlier report into the output.")
    ] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Report file to write.")] = None,
    save_outputs: Annotated[
        Path | None,
        typer.Option("--save-outputs", metavar="DIR", help="Save the outputs accuracy looks at."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the report file has, measure the rest.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds one result may take before it is given up.")
    ] = 600.0,
) -> None:
    from rlbench.cli import exit_code, options
    from rlbench.plan import make_plan, make_request
    from rlbench.run import interpreters
    from rlbench.run.environments import inspect
    from rlbench.run.saving import Destination

    op = discover.ops()[str(context.info_name)]
    path = out or Path(f"rlbench-{op.name}.json")
    request = make_request(
        op,
        only=only,
        skip=skip,
        scenarios=scenario,
        passes=pass_,
        cases=case,
        dtypes=dtype,
        preset=preset,
    )
    listed = interpreters.from_file(envs) if envs else []
    named = interpreters.together([*listed, *interpreters.from_options(env)])
    options.check_device(device)
    earlier = options.load_reports(merge)
    resumed = options.open_output(path, resume=resume)
    environments = inspect(named, device)
    plan = make_plan(request, environments)
    recorder = options.recorder(path, preset, resumed)
    recorder.admit(environments)
    destination = Destination(save_outputs) if save_outputs else None
    if destination:
        destination.open(plan, request)
    if not resume:
        options.set_aside(path)
    finished = measure(plan, recorder, timeout, destination)
    report = save(recorder, earlier)
    tell(report, recorder, finished=finished)
    if destination:
        tell_saved(destination, plan, recorder)
    if recorder.write_error or (destination and destination.not_saved):
        raise typer.Exit(exit_code.NOT_WRITTEN)
    raise typer.Exit(exit_code.of_run(report, request) if finished else exit_code.INTERRUPTED)


def measure(
    plan: Plan, recorder: Recorder, timeout_s: float, destination: Destination | None
) -> bool:
    """Run the plan with a live display. False if the user stopped it."""
    from rlbench.cli.interrupt import end_on_sigterm_too
    from rlbench.cli.progress import progress
    from rlbench.run.supervisor import execute

    end_on_sigterm_too()
    recorder.save()
    todo = sum(job.key not in recorder.finished for job in plan.jobs)
    try:
        with progress(todo) as listener:
            execute(plan, recorder, listener, timeout_s, destination)
    except KeyboardInterrupt:
        return False
    return True


def save(recorder: Recorder, earlier: list[tuple[str, Report]]) -> Report:
    """The final report: what was measured, with earlier reports folded in."""
    from rlbench.merge import merge as fold

    report = recorder.report()
    if earlier:
        own = (str(recorder.out), report)
        report = fold([own, *earlier])
    recorder.replace(report)
    return report


def tell(report: Report, recorder: Recorder, *, finished: bool) -> None:
    """Print the tables, where the report is, and what went wrong on the way."""
    from rich.console import Console

    from rlbench.render import table
    from rlbench.results.store import rescue

    console = Console()
    table.show(report, console)
    out = recorder.out
    if recorder.write_error:
        place = rescue(report, out)
        typer.echo(f"rlbench: {recorder.write_error}; the report is in {place}", err=True)
    else:
        typer.echo(f"\nreport: {out} (rlbench show {out} --format markdown for all figures)")
    if not finished:
        rest = "rlbench ... --resume measures the rest"
        typer.echo(
            f"rlbench: interrupted; {len(report.results)} results are kept; {rest}", err=True
        )


def tell_saved(destination: Destination, plan: Plan, recorder: Recorder) -> None:
    """Print where the outputs are, and whose are missing."""
    from rlbench.render.view import clean

    folder = destination.folder
    typer.echo(f"outputs: {folder} (rlbench show {recorder.out} --agreement --outputs {folder})")
    for reason, whose in destination.not_saved.items():
        names = ", ".join(whose)
        typer.echo(f"rlbench: the outputs of {names} were not saved: {clean(reason)}", err=True)
    measured = {result.key for result in recorder.earlier_results() if result.errors}
    kept = destination.absent(job for job in plan.jobs if job.key in measured)
    if kept:
        names = ", ".join(kept)
        typer.echo(
            f"rlbench: --resume kept the results of {names}, whose outputs are not in {folder}; "
            "a run without --resume saves them",
            err=True,
        )
