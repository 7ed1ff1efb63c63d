"""The command line: one file a command. Heavy imports wait until a command runs."""

from __future__ import annotations

import sys

import typer

from rlbench import __version__, discover
from rlbench.cli.engines import engines
from rlbench.cli.env import env
from rlbench.cli.merge import merge
from rlbench.cli.run import run
from rlbench.cli.schema import schema
from rlbench.cli.show import show
from rlbench.errors import RlbenchError

app = typer.Typer(
    name="rlbench",
    help="Which kernel gives the trainer and the rollout engine the same bits, and at what price?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _op in discover.ops().values():
    app.command(_op.name, help=f"Measure engines on {_op.name}. {_op.summary}")(run)
app.command("merge")(merge)
app.command("show")(show)
app.command("engines")(engines)
app.command("schema")(schema)
app.add_typer(env, name="env")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"rlbench {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Which kernel gives the trainer and the rollout engine the same bits, and at what price?"""


def main() -> None:
    """Run the command line; a user's mistake becomes one line and an exit code."""
    try:
        app()
    except SystemExit as end:
        if isinstance(end.__context__, typer.Abort):
            from rlbench.cli.exit_code import INTERRUPTED

            sys.exit(INTERRUPTED)
        # click turns a broken pipe into exit code 1, which here means a broken claim.
        if isinstance(end.__context__, BrokenPipeError):
            sys.exit(0)
        raise
    except RlbenchError as error:
        typer.echo(f"rlbench: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is its right.
        sys.stderr.close()
        sys.exit(0)
