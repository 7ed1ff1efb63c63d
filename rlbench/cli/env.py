"""`rlbench env`: environments for engines that cannot live together."""

from __future__ import annotations

import typer

from rlbench.cli.env_check import check
from rlbench.cli.env_create import create

env = typer.Typer(
    help="Build environments for engines, and check what imports where.", no_args_is_help=True
)
env.command("create")(create)
env.command("check")(check)
