"""Log files: tables of numbers from a Recorder, TensorBoard, Weights & Biases or a script."""

from __future__ import annotations

import array
import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchzero_clip.core.user_warnings import warn
from torchzero_clip.study.json_logs import TENSORBOARD, of_json
from torchzero_clip.study.table import ROW

WANTED = "a column of norms, such as grad_norm, and preferably a column such as step"
STEPS = ("step", "steps", "global_step", "globalstep", "iteration", "iter", "it", "update")
"""Names of columns that contain step numbers."""
NOTHING = ("", "none", "null", "na", "n/a", "-")
"""Texts that stand for a missing value in a cell."""
TENSOR = re.compile(r"tensor\((.+?)(?:,.*)?\)")
"""The pattern of a cell that was written with `str(tensor)`."""
GRADIENTS = re.compile(r"grad|total_?norm|global_?norm|(^|_)g_?norm")
OTHERS = re.compile(r"__(min|max)$|normali[sz]|^max_")
"""The pattern of names that look like gradient norms but are not.

They belong to minima and maxima of grouped W&B runs, to normalization layers, and to thresholds.
"""
GZIP = b"\x1f\x8b"
"""The first bytes of every gzip file."""


class Log:
    """A log file as a dict from column names to cells. All cells are text.

    Args:
        cells: The cells of each column. All columns have the same length.
        source: The name of the file, for error messages.
        comma: Whether numbers have a decimal comma, such as 0,5.
    """

    def __init__(self, cells: Mapping[str, list[str]], source: str, comma: bool = False) -> None:
        self.cells = dict(cells)
        self.source = source
        self.comma = comma
        if not any(self.cells.values()):
            raise ValueError(f"Trace: {source} has no steps")

    @property
    def norms(self) -> list[str]:
        """The names of columns that look like gradient norms. The likeliest name comes first."""
        if [*self.cells] == TENSORBOARD:
            return ["Value"]
        return norms_of(self.cells)

    def choose(self, name: str | None) -> str:
        """Check and return the name of the norms. None chooses the likeliest norms."""
        if name is None and self.norms:
            return self.norms[0]
        columns = f"its columns are {[*self.cells]}"
        if name is None:
            if all(map(is_number, self.cells)):
                raise ValueError(
                    f"Trace: the first line of {self.source} must have the names of the columns, "
                    f"such as step,grad_norm, got {','.join(self.cells)}"
                )
            raise ValueError(
                f"Trace: {self.source} must have {WANTED}, but {columns}. If one of these "
                "columns contains the norms, pass the name of this column: --norms NAME, or "
                "Trace.read(path, NAME)"
            )
        if not self.units(name):
            raise ValueError(f"Trace: {self.source} has no column {name!r}; {columns}")
        return name

    def units(self, name: str) -> list[str]:
        """Return the columns of the norms with a name: one column, or one column for each unit."""
        return [key for key in self.cells if key == name or key.startswith(f"{name}/")]

    def columns(self, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return all columns of numbers, and which cells of each column of norms have a value.

        The column with the step numbers is called "step".

        In a file of a Recorder or of `Trace.write`, each row is a step, also if its norm is
        unknown. Other logs can have rows without a norm, for example rows of a validation. This
        method skips such rows. If several rows have the same step, only the last row is used.

        Args:
            name: The name of the norms.
        """
        wanted = self.units(name)
        columns: dict[str, Tensor] = {}
        for key, cells in self.cells.items():
            try:
                columns[key] = self.numbers(cells)
            except ValueError as error:
                if key in wanted:
                    raise ValueError(
                        f"Trace: column {key!r} of {self.source} must have numbers in all cells: "
                        f"{error}"
                    ) from None
        step = next((key for key in columns if is_step(key) and key not in wanted), None)
        if step is not None:
            columns = {"step": columns.pop(step), **columns}
        known = {key: self.known(key, columns[key]) for key in wanted}
        if self.has_row_per_step(name):
            return columns, known
        rows = torch.stack([*known.values()]).any(0).nonzero().flatten()
        if step is not None and not is_increasing(columns["step"][rows]):
            rows = last_of_each_step(columns["step"], rows)
        if not len(rows):
            raise ValueError(f"Trace: column {name!r} of {self.source} has no numbers")
        columns = {key: values[rows] for key, values in columns.items()}
        return columns, {key: values[rows] for key, values in known.items()}

    def has_row_per_step(self, name: str) -> bool:
        """Return whether a Recorder or `Trace.write` wrote the log, so that each row is a step.

        `Trace.write` writes the column "step" and columns such as "norm/weight". Other programs
        also log metrics with names such as "ZClip/norm".
        """
        by_recorder = ROW in self.cells and name.rpartition("/")[2] == "norm"
        by_trace = next(iter(self.cells)) == "step" and name == "norm" and name not in self.cells
        return by_recorder or by_trace

    def known(self, key: str, numbers: Tensor) -> Tensor:
        """Return which cells of a column have a value. The text "nan" is a value."""
        cells = self.cells[key]
        places = numbers.isnan().nonzero().flatten()
        written = [cells[i].strip().lower() not in NOTHING for i in places.tolist()]
        return (~numbers.isnan()).index_copy(0, places, torch.tensor(written, dtype=torch.bool))

    def numbers(self, cells: list[str]) -> Tensor:
        """Return the numbers of cells, and raise a `ValueError` if one is not a number."""
        try:
            values = array.array("d", map(float, cells))  # most files have only plain numbers
        except ValueError:
            values = array.array("d", map(self.number, cells))
        return torch.frombuffer(values, dtype=torch.float64)

    def number(self, cell: str) -> float:
        """Return the number of a cell, or NaN if the cell has no value."""
        text = cell.strip()
        if text.lower() in NOTHING:
            return math.nan
        if self.comma:
            text = text.replace(",", ".")
        tensor = TENSOR.fullmatch(text)
        return float(text if tensor is None else tensor[1])


def norms_of(columns: Iterable[str]) -> list[str]:
    """Return the names of columns that look like gradient norms. The likeliest comes first."""
    names = dict.fromkeys(filter(None, map(norm_of, columns)))
    return sorted(names, key=lambda name: (name.rpartition("/")[2] != "norm", "clipped" in name))


def warn_of_parts(names: Sequence[str]) -> None:
    """Warn if the first of these norms may cover only some of the parameters.

    This is so if the rule of these norms and another rule are inside the same rule, as in
    "Partition/actor/norm" and "Partition/critic/norm".
    """
    if not names:
        return
    outer = names[0].partition("/")[0]
    kind = names[0].rpartition("/")[2]
    parts = [x for x in names if x.startswith(f"{outer}/") and x.rpartition("/")[2] == kind]
    if len(parts) > 1:
        warn(
            f"Trace: each of the columns {parts} may contain the norms of only some parameters. "
            f"Trace uses {names[0]!r}. To choose a column, pass name="
        )


def norm_of(column: str) -> str | None:
    """Return the name of the norms to which a column belongs: "ZClip/norm" for "ZClip/norm/3"."""
    parts = column.split("/")
    for i, part in enumerate(parts):
        word = part.rpartition(" - ")[2].strip().lower().replace(" ", "_")  # W&B: "run - name"
        is_ratio = word == "ratio" and parts[i - 1].startswith("Watch")
        if is_gradient_norm(word) or is_ratio:
            return "/".join(parts[: i + 1])
    return None


def is_gradient_norm(word: str) -> bool:
    """Return whether a word looks like the name of a gradient norm."""
    if word == "norm":
        return True
    return "norm" in word and bool(GRADIENTS.search(word)) and not OTHERS.search(word)


def is_step(column: str) -> bool:
    """Return whether a column has the name of a column with step numbers."""
    return column.rpartition("/")[2].strip(" _").lower().replace(" ", "_") in STEPS


def is_increasing(steps: Tensor) -> bool:
    """Return whether each step number is larger than the previous one, as in most files."""
    return bool(steps.isfinite().all() and (steps.diff() > 0).all())


def last_of_each_step(steps: Tensor, rows: Tensor) -> Tensor:
    """Return, from some rows, the last row of each step, ordered by step."""
    pairs = zip(steps[rows].tolist(), rows.tolist(), strict=True)
    last = {step: row for step, row in pairs if math.isfinite(step)}  # a later row replaces it
    return torch.tensor([last[step] for step in sorted(last)], dtype=torch.int64)


def is_number(text: str) -> bool:
    """Return whether Python can convert a text to a float."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def read(path: Path) -> Log:
    """Read a log file. A program may still be writing the file."""
    return parse(path.read_bytes(), str(path))


def parse(contents: bytes, source: str, growing: bool = False) -> Log:
    """Read a log from the contents of a file.

    If the last line of a table has no newline, it is skipped with a warning. But if the line has
    all cells and the file is not growing, the line is used.

    Args:
        contents: The contents of the file.
        source: The name of the file, for error messages.
        growing: Whether a program is still writing the file.
    """
    cut = growing
    if contents.startswith(GZIP):
        contents, is_whole = decompressed(contents, source)
        cut = cut or not is_whole
    is_utf16 = contents.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = contents.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if not text.strip():
        raise ValueError(f"Trace: {source} has no steps")
    if "\0" in text:
        raise ValueError(
            f"Trace: {source} must be a CSV or JSON file with {WANTED}: export an event file or a "
            "spreadsheet to CSV first"
        )
    if text.lstrip()[0] in "{[":
        return Log(of_json(text, source), source)
    lines, delimiter = table(with_whole_lines(text, source, cut))
    return Log(cells_of(lines, source, delimiter), source, comma=delimiter == ";")


def with_whole_lines(text: str, source: str, cut: bool) -> str:
    """Return a table without a last line that is incomplete. A complete line ends with a newline.

    Args:
        text: The table.
        source: The name of the file, for warnings.
        cut: Whether the file is not finished, so the last line may be incomplete.
    """
    above, _, last = text.rpartition("\n")
    if not last.strip():
        return text
    if above and not cut and has_all_cells(f"{above}\n", last):
        warn(
            f"Trace: the last line of {source} may be incomplete, but Trace uses this line: {last}"
        )
        return f"{text}\n"
    warn(f"Trace: the last line of {source} is incomplete, so Trace skips this line")
    return f"{above}\n" if above else ""


def has_all_cells(above: str, last: str) -> bool:
    """Return whether the last line has as many cells as the header, and ends with a number.

    If the last cell of the line above is empty, the last cell of this line may be empty too.
    """
    lines, delimiter = table(above)
    try:
        header, before, row = [
            next(csv.reader([line], delimiter=delimiter, strict=True))
            for line in (lines.partition("\n")[0], lines.rstrip().rpartition("\n")[2], last)
        ]
    except (csv.Error, StopIteration):
        return False
    end = row[-1].strip().replace(",", ".")
    return len(row) == len(header) and (is_number(end) or end == before[-1].strip() == "")


def delimiter_of(line: str) -> str:
    """Return the delimiter between the cells of a line: comma, semicolon, tab or space."""
    most_frequent = max(",;\t", key=line.count)
    return most_frequent if most_frequent in line or " " not in line.strip() else " "


def table(text: str) -> tuple[str, str]:
    """Return a table without the comments above it, and the delimiter of its cells.

    A comment is a line that begins with "#". The last comment is the header if it has as many cells
    as the line below, as in a file of `numpy.savetxt`.
    """
    lines = text.splitlines(keepends=True)
    while len(lines) > 1 and lines[0].startswith("#"):
        below = lines[1]
        comment = lines[0].lstrip("# ")
        delimiter = delimiter_of(below)
        if not below.startswith("#") and comment.count(delimiter) == below.count(delimiter):
            lines[0] = comment
        else:
            del lines[0]
    header, below = [*lines, "", ""][:2]
    delimiter = delimiter_of(header)
    words = header.split(" ")
    if delimiter == " " and (below.count(" ") + 1 != len(words) or any(map(is_number, words))):
        delimiter = ","  # one column whose name has a space, or lines of text
    return "".join(lines), delimiter


def cells_of(text: str, source: str, delimiter: str) -> dict[str, list[str]]:
    """Return the cells of a table. The first line has the column names."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    cells: list[str] = []  # of all lines, because a list for each line would need much memory
    width = 0
    line = 1
    try:
        for row in reader:
            if row:  # a line may be empty
                width = width or len(row)
                cells += row
            if row and len(row) != width:
                raise ValueError(
                    f"Trace: every line of {source} must have {width} cells, like the header, "
                    f"but line {line} has {len(row)} cells"
                )
            line = reader.line_num + 1
    except csv.Error as error:
        what = "an opening quote without a closing quote, or a very long cell"
        raise ValueError(f"Trace: line {line} of {source} has {what}: {error}") from None
    return {cells[i].strip(): cells[width + i :: width] for i in range(width)}


def decompressed(contents: bytes, source: str) -> tuple[bytes, bool]:
    """Return the decompressed contents of a gzip file, and whether the file is complete."""
    parts = [b""]
    with gzip.open(io.BytesIO(contents)) as file:
        try:
            while part := file.read1():
                parts.append(part)
        except EOFError:  # the file has no end
            return b"".join(parts), False
        except (OSError, zlib.error) as error:
            raise ValueError(
                f"Trace: {source} must be an intact .gz file, or a text file: {error}"
            ) from None
    return b"".join(parts), True
