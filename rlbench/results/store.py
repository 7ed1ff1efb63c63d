"""Reports on disk: read with a clear error for whatever is wrong, written so that none is lost."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlbench.errors import ReportError
from rlbench.results import atomic
from rlbench.results.schema import Report, Result
from rlbench.results.vocabulary import SCHEMA


def load(path: Path) -> Report:
    """Read a report. Raises ReportError, with the file and the reason."""
    if path.is_dir():
        raise ReportError(f"{path}: is a directory; name a report file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ReportError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as why:
        raise ReportError(f"{path}: cannot be read: {why}") from None
    return parse(text, str(path))


def parse(text: str, name: str) -> Report:
    """A report from its JSON text; `name` stands in error messages."""
    try:
        data = json.loads(text, parse_constant=_no_constant, parse_float=_number)
    except RecursionError:
        raise ReportError(f"{name}: is not a report: it is nested too deep") from None
    except ValueError as why:
        cut = "" if text.rstrip().endswith("}") else " (the file looks cut off)"
        raise ReportError(f"{name}: is not JSON: {why}{cut}") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise ReportError(f"{name}: is not an rlbench report: it has no `schema` field")
    if data["schema"] != SCHEMA:
        raise ReportError(f"{name}: has schema {data['schema']!r}; this rlbench reads {SCHEMA!r}")
    try:
        return Report.model_validate(data)
    except ValidationError as why:
        problem = why.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "the report"
        raise ReportError(f"{name}: {where}: {problem['msg']}") from None


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not strict JSON")


def dump(report: Report) -> str:
    """A report as JSON text: exactly the fields that were set, unknown ones included."""
    data = report.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def dump_result(result: Result) -> str:
    """A result as it stands in a report's text."""
    record = result.model_dump(mode="json", by_alias=True, exclude_unset=True)
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    return textwrap.indent(text, "  ")


def dump_around(head: Report, results: Collection[str]) -> str:
    """The text of `head`, a report without results, with these: dumped once, written many times."""
    text = dump(head)
    empty = '"results": []'
    if text.count(empty) != 1 or not results:
        return text
    return text.replace(empty, '"results": [\n' + ",\n".join(results) + "\n ]")


def save(report: Report, path: Path) -> None:
    """Write atomically: the file is the old report or the new one, never half of one.

    Raises ReportError; the earlier file is then untouched.
    """
    save_text(dump(report), path)


def save_text(text: str, path: Path) -> None:
    """As `save`, of a report that is text already."""
    try:
        _write(text, path)
    except OSError as why:
        raise ReportError(f"{path}: cannot be written: {why.strerror or why}") from None


def _write(text: str, path: Path) -> None:
    atomic.write(path, [text.encode()])


def check_writable(path: Path) -> None:
    """Fail before hours of measuring instead of after. Raises ReportError."""
    if path.is_dir():
        raise ReportError(f"--out: {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ReportError(f"--out: there is no directory {path.parent}; create it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as why:
        raise ReportError(f"--out: cannot write in {path.parent}: {why.strerror}") from None


def rescue(report: Report, path: Path) -> str:
    """Where else a report went that could not be written to `path`: nothing measured is lost."""
    fallback = Path(tempfile.gettempdir()) / f"rescued-{os.getpid()}-{path.name}"
    try:
        _write(dump(report), fallback)
    except OSError:
        sys.stdout.write(dump(report))
        return "standard output"
    return str(fallback)


def keep_earlier(path: Path) -> Path | None:
    """Move an existing report aside, to `name.2.json` or the next free number."""
    if not path.exists():
        return None
    number = 2
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
    return aside
