"""`rlbench env check`: which engines import where, tried for real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rlbench.run.imports import Finding
    from rlbench.run.interpreters import Interpreter

    Findings = Mapping[tuple[str, str], Finding]
    Facts = Mapping[str, Mapping[str, Any]]


def check(
    env: Annotated[
        list[str],
        typer.Option("--env", metavar="NAME=PYTHON", help="Also check this interpreter."),
    ] = [],  # noqa: B006  # typer copies it
    envs: Annotated[
        Path | None, typer.Option("--envs", help="TOML file of interpreters and their engines.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds one import may take before it is given up.")
    ] = 180.0,
) -> None:
    """Say what imports where: each engine, in a fresh process of each interpreter."""
    from rich.console import Console

    from rlbench.run import imports, interpreters
    from rlbench.run.environments import ask

    listed = interpreters.from_file(envs) if envs else []
    named = interpreters.together([*listed, *interpreters.from_options(env)])
    with Console(stderr=True).status("importing every engine that is there"):
        facts = ask(named, "auto")
        findings = imports.find(named, facts, timeout)
    show(named, facts, findings, Console())
    raise typer.Exit(exit_code(named, findings))


def exit_code(interpreters: Sequence[Interpreter], findings: Findings) -> int:
    """3 if an engine does not import in the environment that is told to run it."""
    from rlbench import discover
    from rlbench.cli.exit_code import NOT_AVAILABLE
    from rlbench.run.imports import State

    told = {(i.name, discover.engines()[e].name) for i in interpreters for e in i.engines}
    return NOT_AVAILABLE if any(findings[key].state is not State.IMPORTS for key in told) else 0


def show(
    interpreters: Sequence[Interpreter], facts: Facts, findings: Findings, console: Console
) -> None:
    """Print the table, why imports fail, and how to get what is nowhere."""
    from rich.text import Text

    from rlbench.render.view import clean
    from rlbench.run.imports import State

    console.print(table(interpreters, facts, findings))
    for (environment, engine), found in findings.items():
        if found.state in {State.FAILS, State.INCOMPLETE}:
            line = Text.assemble((clean(f"{engine} in {environment}: "), "bold"))
            console.print(line.append(clean(str(found.reason)), "yellow"), soft_wrap=True)
    for how, engines in nowhere(findings).items():
        line = Text(f"nowhere: {', '.join(engines)}; to get: {how}", style="dim")
        console.print(line, soft_wrap=True)


def table(interpreters: Sequence[Interpreter], facts: Facts, findings: Findings) -> Table:
    """Environments across; what they are and the engines down."""
    from rich.table import Table
    from rich.text import Text

    from rlbench.render.view import clean

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    shown.add_column("")
    for interpreter in interpreters:
        shown.add_column(Text(clean(interpreter.name)), overflow="fold")
    names = [i.name for i in interpreters]
    for what, value in ABOUT.items():
        shown.add_row(what, *(Text(clean(value(facts[name]))) for name in names), style="dim")
    for engine in dict.fromkeys(engine for _, engine in findings):
        shown.add_row(engine, *(cell(findings[name, engine]) for name in names))
    return shown


def _torch(facts: Mapping[str, Any]) -> str:
    version = facts["packages"].get("torch")
    if version is None:
        return "not installed"
    return f"{version} fails" if "no_torch" in facts else str(version)


def _device(facts: Mapping[str, Any]) -> str:
    return str((facts.get("device") or {}).get("name") or facts.get("no_device") or "–")


ABOUT = {"python": lambda facts: str(facts["python"]), "torch": _torch, "device": _device}
"""Row -> what an environment's facts say there."""


def cell(found: Finding) -> Text:
    """The version of an engine that imports, or in a word why it does not."""
    from rich.text import Text

    from rlbench.render.view import clean
    from rlbench.run.imports import State

    styles = {State.IMPORTS: "green", State.ABSENT: "dim"}
    words = {State.IMPORTS: clean(found.version or "imports"), State.ABSENT: "–"}
    style = styles.get(found.state, "bold red")
    return Text(words.get(found.state, found.state.value), style=style)


def nowhere(findings: Findings) -> dict[str, list[str]]:
    """Command -> the engines that it brings, of those that no environment has."""
    from rlbench import discover
    from rlbench.envs.groups import of_engine
    from rlbench.run.imports import State

    there = {engine for (_, engine), f in findings.items() if f.state is not State.ABSENT}
    found: dict[str, list[str]] = {}
    for name, engine in {v.name: v.engine for v in discover.engines().values()}.items():
        if name not in there:
            group = of_engine(engine)
            command = f"rlbench env create {group.name}" if group else engine.install
            found.setdefault(command, []).append(name)
    return found
