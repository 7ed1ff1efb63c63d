"""Imports modules in the interpreter that this runs in; prints what went wrong, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys


def main(modules: list[str]) -> None:
    """Import one after another; the last line printed is the failure, or null."""
    failure = None
    try:
        for module in modules:
            importlib.import_module(module)
    except BaseException as why:  # sys.exit in a package is one, too
        failure = describe(why)
    # After a line break: a package may have left one open.
    sys.stdout.write(f"\n{json.dumps(failure)}\n")
    sys.stdout.flush()
    # Whether the interpreter ends well after that is another question.
    os._exit(0)


def describe(error: BaseException) -> str:
    """The error, and the one that it began with if it hides that."""
    first = error
    while cause := first.__cause__ or (None if first.__suppress_context__ else first.__context__):
        first = cause
    text = f"{type(error).__name__}: {error}"
    return text if first is error else f"{text} (because of {type(first).__name__}: {first})"
