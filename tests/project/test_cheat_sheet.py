"""Every row of the cheat sheet runs, given the names that the page defines first."""

import re
import warnings

import pytest

from tests.helpers import ROOT, at_once

PAGE = (ROOT / "docs" / "cheat_sheet.md").read_text()
SETUP = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
ROWS = re.findall(r"^\| ([^|]+) \| `(.+)` \|$", PAGE, re.MULTILINE)


def test_the_sheet_has_rows_and_each_task_stands_once():
    tasks = [task for task, _ in ROWS]
    assert len(tasks) == len(set(tasks)) > 40
    table_lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    headings = 2 * PAGE.count("| task | code |")
    assert len(table_lines) == len(ROWS) + headings


@at_once("task, code", ROWS)
def test_each_row_runs(task, code, tmp_path_factory):
    names = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.chdir(tmp_path_factory.mktemp("sheet"))
        warnings.simplefilter("ignore")  # rows are lines of a program, not whole programs
        exec(SETUP, names)
        if "torch.load" in code:
            names["torch"].save(names["opt"].state_dict(), "opt.pt")
        exec(code, names)
