"""Keeps the tables of a page equal to the reports they are made from.

Between `<!-- report: FILE case: ID -->` and `<!-- end of report -->` stands the one-table view of a
case. `python -m rlbench.render.readme README.md` writes it again; a test says when that is due.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rlbench.errors import UsageError
from rlbench.render import markdown, view
from rlbench.results import store

BLOCK = re.compile(
    r"(?P<head><!-- report: (?P<file>\S+) case: (?P<case>\S+) -->\n)"
    r".*?"
    r"(?P<foot><!-- end of report -->)",
    re.DOTALL,
)


def fill(text: str, root: Path) -> str:
    """The page with every table made anew; report files are found from `root`."""

    def block(found: re.Match[str]) -> str:
        report = store.load(root / found["file"])
        sheets = {sheet.case_id: sheet for sheet in view.sheets(report)}
        if found["case"] not in sheets:
            known = ", ".join(sheets)
            raise UsageError(f"{found['file']}: has no case {found['case']!r}; it has {known}")
        sheet = view.present(sheets[found["case"]])
        table = markdown.glance(report, sheet, several=view.twice(sheet))
        return f"{found['head']}{table}\n{found['foot']}"

    return BLOCK.sub(block, text)


def main() -> None:
    """Rewrite the pages named on the command line, in place."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(fill(page.read_text(encoding="utf-8"), page.parent), encoding="utf-8")


if __name__ == "__main__":
    main()
