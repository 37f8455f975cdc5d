"""LiveFile: a file that grows with a recorded run, and the lab that follows it."""

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
    """A file of its own with the rows of a history, shown by a process of its own.

    It ends where its page is closed; whoever writes here goes on.
    """

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="torchzero_clip-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder, "run.csv")
        self._form: object = None
        self._rows = 0
        command = [sys.executable, "-m", "torchzero_clip", "lab", "--follow", str(self.path)]
        self.process = subprocess.Popen(command)

    def show(self, table: Table) -> None:
        """Write the rows that are new and whole; all of them where they are others than before."""
        if self.process.poll() is not None:
            return
        header = table.header(named=True)
        form = id(table), table.stride, header
        if form != self._form:
            self._form, self._rows = form, 0
        rows = table.rows(self._rows)
        if rows and int(rows[-1][0]) % table.stride:
            del rows[-1]
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows if self._rows else [header, *rows])
        if self._rows:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                file.write(text.getvalue())
        elif rows:
            aside = self.path.with_suffix(".part")
            aside.write_text(text.getvalue(), encoding="utf-8", newline="")
            os.replace(aside, self.path)
        self._rows += len(rows)
