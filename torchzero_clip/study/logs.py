"""Logs: the table of numbers that a logger wrote, as a Recorder, TensorBoard, W&B and others do."""

from __future__ import annotations

import array
import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchzero_clip.core.user_warnings import warn
from torchzero_clip.study.json_logs import TENSORBOARD, of_json

WANTED = "a column such as grad_norm, and best one such as step"
STEPS = ("step", "steps", "global_step", "globalstep", "iteration", "iter", "it", "update")
NOTHING = ("", "none", "null", "na", "n/a", "-")
TENSOR = re.compile(r"tensor\((.+?)(?:,.*)?\)")  # what str() makes of one
GRADIENTS = re.compile(r"grad|total_?norm|global_?norm|(^|_)g_?norm")
OTHERS = re.compile(r"__(min|max)$|normali[sz]|^max_")  # of W&B's groups, of layers, and limits
PACKED = b"\x1f\x8b"  # how a file of gzip begins


class Log:
    """The cells of a file by their column, as text.

    Args:
        cells: The columns, all of one length.
        source: What sentences call the file.
        comma: Whether numbers are written 0,5.
    """

    def __init__(self, cells: Mapping[str, list[str]], source: str, comma: bool = False) -> None:
        self.cells, self.source, self.comma = dict(cells), source, comma
        if not any(self.cells.values()):
            raise ValueError(f"Trace: {source} has no steps")

    @property
    def norms(self) -> list[str]:
        """The names of columns that look like norms of gradients, the likeliest first."""
        if [*self.cells] == TENSORBOARD:
            return ["Value"]
        return norms_of(self.cells)

    def choose(self, name: str | None) -> str:
        """The columns with this name, or the likeliest."""
        if name is None and self.norms:
            return self.norms[0]
        there = f"there are {[*self.cells]}"
        if name is None:
            if all(map(is_number, self.cells)):
                raise ValueError(
                    f"Trace: {self.source} must begin with a line of names, such as "
                    f"step,grad_norm, got {','.join(self.cells)}"
                )
            raise ValueError(
                f"Trace: {self.source} must have {WANTED}; {there}. If one of these has the norms, "
                "name it: --norms NAME, or Trace.read(path, NAME)"
            )
        if not self.units(name):
            raise ValueError(f"Trace: there is no column {name!r}; {there}")
        return name

    def units(self, name: str) -> list[str]:
        """The columns of a name: one, or one for each unit."""
        return [key for key in self.cells if key == name or key.startswith(f"{name}/")]

    def columns(self, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All columns of numbers, and where those with this name have any; "step" is the step.

        In a log that is not a Recorder's, a row without any norm is another occasion's, such as a
        validation, and of rows with one step the last holds.
        """
        wanted, columns = self.units(name), dict[str, Tensor]()
        for key, column in self.cells.items():
            try:
                columns[key] = self.numbers(column)
            except ValueError as error:
                if key in wanted:
                    raise ValueError(
                        f"Trace: {self.source} must have numbers in its cells: {error}, in column "
                        f"{key!r}"
                    ) from None
                continue
        step = next((key for key in columns if is_step(key) and key not in wanted), None)
        if step is not None:
            columns = {"step": columns.pop(step), **columns}
        known = {key: self.known(key, columns[key]) for key in wanted}
        if name.rpartition("/")[2] == "norm":  # of a Recorder
            return columns, known
        kept = torch.stack([*known.values()]).any(0).nonzero().flatten()
        if step is not None and not is_counting(numbered := columns["step"][kept]):
            places = zip(numbered.tolist(), kept.tolist(), strict=True)
            last = {number: place for number, place in places if math.isfinite(number)}
            kept = torch.tensor([last[number] for number in sorted(last)], dtype=torch.int64)
        if not len(kept):
            raise ValueError(f"Trace: {self.source} has no number in column {name!r}")
        chosen = [{key: values[kept] for key, values in some.items()} for some in (columns, known)]
        return chosen[0], chosen[1]

    def known(self, key: str, numbers: Tensor) -> Tensor:
        """Where a column of these numbers has something in its cells, be it NaN."""
        column, there = self.cells[key], ~numbers.isnan()
        places = numbers.isnan().nonzero().flatten()
        spelt = [column[i].strip().lower() not in NOTHING for i in places.tolist()]
        return there.index_copy(0, places, torch.tensor(spelt, dtype=torch.bool))

    def numbers(self, column: list[str]) -> Tensor:
        """The numbers of cells; most files have nothing but plain ones, and may be long."""
        try:
            made = array.array("d", map(float, column))
        except ValueError:
            made = array.array("d", map(self.number, column))
        return torch.frombuffer(made, dtype=torch.float64)

    def number(self, cell: str) -> float:
        """The number of a cell; NaN for nothing."""
        text = cell.strip()
        if text.lower() in NOTHING:
            return math.nan
        if self.comma:
            text = text.replace(",", ".")
        return float(text if (tensor := TENSOR.fullmatch(text)) is None else tensor[1])


def norms_of(columns: Iterable[str]) -> list[str]:
    """The names of columns that look like norms of gradients, the likeliest first."""
    found = dict.fromkeys(filter(None, map(norm_of, columns)))
    return sorted(found, key=lambda name: (name.rpartition("/")[2] != "norm", "clipped" in name))


def norm_of(column: str) -> str | None:
    """The name of the norms that a column is part of: "ZClip/norm" of "ZClip/norm/3"."""
    parts = column.split("/")
    for i, part in enumerate(parts):
        word = part.rpartition(" - ")[2].strip().lower().replace(" ", "_")  # W&B: "run - name"
        if is_gradients(word) or (word == "ratio" and parts[i - 1].startswith("Watch")):
            return "/".join(parts[: i + 1])
    return None


def is_gradients(word: str) -> bool:
    """Whether a word is about norms of gradients."""
    found = "norm" in word and GRADIENTS.search(word) and not OTHERS.search(word)
    return word == "norm" or bool(found)


def is_step(column: str) -> bool:
    """Whether a column counts steps."""
    return column.rpartition("/")[2].strip(" _").lower().replace(" ", "_") in STEPS


def is_counting(steps: Tensor) -> bool:
    """Whether each step comes after the last, as in most files."""
    return bool(steps.isfinite().all() and (steps.diff() > 0).all())


def is_number(text: str) -> bool:
    """Whether a cell is one, as Python spells it."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def read(path: Path) -> Log:
    """The log in a file, as far as it was written."""
    return parse(path.read_bytes(), str(path))


def parse(contents: bytes, source: str, growing: bool = False) -> Log:
    """The log in the contents of a file.

    A last line of a table that has no end is left out, with a warning, unless it has all its cells
    and the file is not `growing`.
    """
    cut = growing
    if contents.startswith(PACKED):
        contents, whole = unpacked(contents, source)
        cut = cut or not whole
    wide = contents.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = contents.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if not text.strip():
        raise ValueError(f"Trace: {source} has no steps")
    if "\0" in text:
        raise ValueError(
            f"Trace: {source} must be text, CSV or JSON, with {WANTED}: of an event file or a "
            "spreadsheet export that first"
        )
    if text.lstrip()[0] in "{[":
        return Log(of_json(text, source), source)
    text = ended(text, source, cut)
    whole_text, between = table(text)
    return Log(cells_of(whole_text, source, between), source, comma=between == ";")


def ended(text: str, source: str, cut: bool) -> str:
    """A table whose last line has an end: without the last where that is not whole."""
    above, _, last = text.rpartition("\n")
    if not last.strip():
        return text
    if above and not cut and has_all_cells(f"{above}\n", last):
        warn(f"Trace: {source} has no newline at its end: its last line is read as it is: {last}")
        return f"{text}\n"
    warn(f"Trace: {source} ends within a line, which is left out")
    return f"{above}\n" if above else ""


def has_all_cells(above: str, last: str) -> bool:
    """Whether a last line without an end has as many cells as the header, and a number at last.

    Nothing at last is whole too where the line above ends so.
    """
    lines, between = table(above)
    try:
        header, before, row = [
            next(csv.reader([line], delimiter=between, strict=True))
            for line in (lines.partition("\n")[0], lines.rstrip().rpartition("\n")[2], last)
        ]
    except (csv.Error, StopIteration):
        return False
    end = row[-1].strip().replace(",", ".")
    return len(row) == len(header) and (is_number(end) or end == before[-1].strip() == "")


def table(text: str) -> tuple[str, str]:
    """A table without what is said above it behind "#", and what stands between two cells."""
    lines = text.splitlines(keepends=True)

    def divider(line: str) -> str:
        found = max(",;\t", key=line.count)
        return found if found in line or " " not in line.strip() else " "

    while len(lines) > 1 and lines[0].startswith("#"):
        between = divider(lines[1])
        header = lines[0].lstrip("# ")
        last = not lines[1].startswith("#")
        if last and header.count(between) == lines[1].count(between):  # as of numpy.savetxt
            lines[0] = header
        else:
            del lines[0]
    header, below = [*lines, "", ""][:2]
    between = divider(header)
    words = header.split(" ")
    if between == " " and (below.count(" ") + 1 != len(words) or any(map(is_number, words))):
        between = ","  # a name of two words, or lines that tell
    return "".join(lines), between


def cells_of(text: str, source: str, between: str) -> dict[str, list[str]]:
    """The cells of a table by the names in its first line."""
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=between, strict=True)
    found: list[str] = []  # of all lines: a list of each would be a million
    wide, line = 0, 1
    try:
        for row in lines:
            if row:  # a line may be empty
                wide = wide or len(row)
                found += row
            if row and len(row) != wide:
                raise ValueError(
                    f"Trace: {source} must have {wide} cells in every line, as many as its "
                    f"header, got {len(row)} in line {line}"
                )
            line = lines.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"Trace: {source} must close every quote that it opens, got line {line}: {error}"
        ) from None
    return {found[i].strip(): found[wide + i :: wide] for i in range(wide)}


def unpacked(packed: bytes, source: str) -> tuple[bytes, bool]:
    """What was packed by gzip, as far as it was written, and whether that is all."""
    parts = [b""]
    with gzip.open(io.BytesIO(packed)) as file:
        try:
            while part := file.read1():
                parts.append(part)
        except EOFError:  # it has no end
            return b"".join(parts), False
        except (OSError, zlib.error) as error:
            raise ValueError(
                f"Trace: {source} must be a whole .gz file, or text: {error}"
            ) from None
    return b"".join(parts), True
