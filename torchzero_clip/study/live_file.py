"""The class `LiveFile`: a file that grows with a recorded run, and the lab that shows it."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

from torchzero_clip.study.table import Table


class LiveFile:
    """A temporary file with the rows of a history, and a process that shows the file in the lab.

    If the user closes the page, the process ends and training continues.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="torchzero_clip-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder, "run.csv")
        self._layout: object = None  # which table the file shows, and in which columns
        self._rows = 0  # rows in the file
        command = [sys.executable, "-m", "torchzero_clip", "lab", "--follow", str(self.path)]
        self.process = subprocess.Popen(command)

    def show(self, table: Table) -> None:
        """Append the new complete rows of a table to the file.

        If columns or earlier rows have changed, this method writes the whole file again.
        """
        if self.process.poll() is not None:
            return
        header = table.header(named=True)
        layout = (id(table), table.stride, header)
        if layout != self._layout:
            self._layout = layout
            self._rows = 0
        rows = table.rows(self._rows)
        if rows and int(rows[-1][0]) % table.stride:
            del rows[-1]  # further steps will be merged into this row
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows if self._rows else [header, *rows])
        if self._rows:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                file.write(text.getvalue())
        elif rows:
            part = self.path.with_suffix(".part")  # so that the lab never reads half a file
            part.write_text(text.getvalue(), encoding="utf-8", newline="")
            os.replace(part, self.path)
        self._rows += len(rows)
