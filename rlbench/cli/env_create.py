"""`rlbench env create`: a group's environment, built from pins that were tested together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlbench.envs.groups import groups, named

if TYPE_CHECKING:
    from rlbench.envs.groups import Group


def create(
    group: Annotated[
        list[str],
        typer.Argument(
            show_default=False,
            help=f"Engine group: {'; '.join(f'{g.name} ({g.summary})' for g in groups().values())}.",
        ),
    ],
    into: Annotated[Path, typer.Option("--into", help="Folder for environments.")] = Path(
        ".rlbench/envs"
    ),
    envs: Annotated[
        Path, typer.Option("--envs", help="TOML file of interpreters to add it to.")
    ] = Path("envs.toml"),
    python: Annotated[
        str | None,
        typer.Option("--python", help="Version or path, instead of the Python that was tested."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build anew what is there already.")
    ] = False,
) -> None:
    """Build the environment of an engine group with uv, from pins that were tested together."""
    from rlbench.cli.interrupt import end_on_sigterm_too
    from rlbench.envs import listing
    from rlbench.envs.create import find_uv

    chosen = named(group)
    listing.check(envs)
    uv = find_uv()
    end_on_sigterm_too()
    for one in chosen:
        build(uv, one, into / one.name, python, force=force)
        add(one, into / one.name, envs)
    typer.echo(f"next: rlbench env check --envs {envs}, then rlbench attention --envs {envs}")


def build(uv: str, group: Group, environment: Path, python: str | None, *, force: bool) -> None:
    """Make sure that the environment is there, and say so."""
    from rlbench.envs import create as creating

    if creating.is_built(group, environment, force=force):
        typer.echo(f"{group.name}: {environment} is there already, with these pins")
        return
    if group.compiled:
        typer.echo(f"{group.name}: {group.compiled.note}", err=True)
    creating.build(uv, group, environment, python)
    typer.echo(f"{group.name}: built {environment}")


def add(group: Group, environment: Path, envs: Path) -> None:
    """List the environment in the file of environments, and say so."""
    from rlbench.envs import listing
    from rlbench.envs.create import interpreter
    from rlbench.envs.groups import engines_of

    engines = engines_of(group)
    if listing.add(envs, group.name, interpreter(environment), engines):
        what = f" for {', '.join(engines)}" if engines else ""
        typer.echo(f"{group.name}: added to {envs}{what}")
    else:
        typer.echo(f"{group.name}: {envs} has [{group.name}] already, which stays as it is")
