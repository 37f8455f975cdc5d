"""The numbers of a recorded run, one row for a few steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.division import UnitIds
from torchzero_clip.floats import KEEPS

ROW = "stands_for"  # the column of a file that says how many steps a row stands for
NOTHING = {"amax": -math.inf, "amin": math.inf, "sum": 0.0}

Entries: TypeAlias = dict[tuple[int, int, int], str]
"""What the entries of a vector are of: what they are sorted by, and a name."""


class Series(NamedTuple):
    """The values of one name for which the same units were measured; None for no units."""

    name: str
    ids: UnitIds | None

    def entries(self, width: int) -> Entries:
        """What each of `width` entries is of."""
        if self.ids is not None:
            return self.ids.names()
        return {(-1, -1, i): str(i) for i in range(width)}


Block: TypeAlias = "list[tuple[Series, bool, list[int], Tensor]]"
"""For each series whether it is of vectors, its steps, and their values as rows."""


class Table:
    """Rows of `stride` steps each, the newest perhaps of fewer, and a column for each name."""

    def __init__(self, last: int = 0) -> None:
        self.stride, self.last = 1, last
        self.steps = torch.empty(0, dtype=torch.int64)  # the last of each row
        self.columns: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def numbers(self) -> int:
        """How many numbers there are in all."""
        return sum(column.values.numel() for column in self.columns.values())

    def add(self, last: int, block: Block) -> None:
        """Add the steps up to `last`, and what was measured in them."""
        rows, first = len(self), self.last + 1
        self.steps = torch.cat([self.steps, torch.arange(first, last + 1)])
        self.last = last
        for series, _, _, values in block:
            name = series.name
            if name not in self.columns:
                self.columns[name] = Column(KEEPS.get(name.split("/")[-1], "sum"))
            self.columns[name].widen(series.entries(values.shape[1]))
        for column in self.columns.values():
            column.resize(len(self))
        for series, vector, steps, values in block:
            places = torch.tensor(steps) - first + rows
            entries = series.entries(values.shape[1])
            self.columns[series.name].put(places, entries, values, vector)
        self.merge(self.stride)

    def merge(self, stride: int) -> Table:
        """Make one row of every `stride` steps."""
        self.stride = stride
        keys, places = torch.unique_consecutive((self.steps - 1) // stride, return_inverse=True)
        if len(keys) < len(self):
            for column in self.columns.values():
                column.merge(places, len(keys))
            ends = torch.zeros(len(keys), dtype=torch.int64)
            self.steps = ends.scatter_reduce(0, places, self.steps, "amax")
        return self

    def counts(self) -> Tensor:
        """How many steps each row stands for."""
        if not len(self):
            return self.steps
        first = (self.steps[:1] - 1) // self.stride * self.stride
        return self.steps.diff(prepend=first)

    def header(self, named: bool = False) -> list[str]:
        """A name for each column of a file: entry i of a vector is name/i, or name/<its unit>."""
        names = ["step", ROW]
        for name, column in self.columns.items():
            units = [*column.units.values()] if named else range(len(column.units))
            names += [f"{name}/{unit}" for unit in units] if column.vector else [name]
        return names

    def rows(self, start: int = 0) -> list[tuple[str, ...]]:
        """The cells of a file from a row on; what was not there is empty."""
        cells = [[str(n) for n in x[start:].tolist()] for x in (self.steps, self.counts())]
        for column in self.columns.values():
            values, there = column.read()[start:].T, (column.counts[start:] > 0).T
            for entries, known in zip(values.tolist(), there.tolist(), strict=True):
                cells.append([repr(v) if k else "" for v, k in zip(entries, known, strict=True)])
        return [*zip(*cells, strict=True)]

    def summary(self) -> list[dict[str, float]]:
        """A dict for each row with one float for each name that was there."""
        out = [{"step": float(step)} for step in self.steps.tolist()]
        for name, column in self.columns.items():
            values, there = column.summary()
            for row, value, known in zip(out, values.tolist(), there.tolist(), strict=True):
                if known:
                    row[name] = value
        return out

    def state_dict(self) -> dict[str, Any]:
        columns = {
            name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(column).items()}
            for name, column in self.columns.items()
        }
        return {"stride": self.stride, "last": self.last, "steps": self.steps, "columns": columns}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Table:
        table = cls(state["last"])
        table.stride, table.steps = state["stride"], state["steps"].cpu()
        for name, parts in state["columns"].items():
            column = table.columns[name] = Column(parts["reduce"])
            column.vector, column.units = parts["vector"], dict(parts["units"])
            column.values, column.counts = [parts[k].cpu().clone() for k in ("values", "counts")]
        return table


class Column:
    """One metric: for every row and unit an extreme or the sum, and of how many steps."""

    def __init__(self, reduce: str) -> None:
        self.reduce, self.vector = reduce, False
        self.units: Entries = {}  # sorted, so that no order of arrival matters
        self.values = torch.empty(0, 0, dtype=torch.float64)
        self.counts = torch.empty(0, 0, dtype=torch.int32)

    def resize(self, rows: int) -> None:
        """Make room for more rows, in which nothing is known."""
        grow = (0, 0, 0, rows - len(self.values))
        self.values = torch.nn.functional.pad(self.values, grow, value=NOTHING[self.reduce])
        self.counts = torch.nn.functional.pad(self.counts, grow)

    def widen(self, units: Entries) -> None:
        """Make room for more units, each at its place among the others."""
        if units.keys() <= self.units.keys():
            return
        old, every = list(self.units), {**self.units, **units}
        self.units = {unit: every[unit] for unit in sorted(every)}
        self.vector |= len(every) > 1
        places, shape = self.places(old), (len(self.values), len(every))
        values = self.values.new_full(shape, NOTHING[self.reduce])
        self.values = values.index_copy(1, places, self.values)
        self.counts = self.counts.new_zeros(shape).index_copy(1, places, self.counts)

    def places(self, units: Iterable[tuple[int, int, int]]) -> Tensor:
        """Where these units stand."""
        place = {unit: i for i, unit in enumerate(self.units)}
        return torch.tensor([place[unit] for unit in units], dtype=torch.int64)

    def put(self, rows: Tensor, units: Entries, values: Tensor, vector: bool) -> None:
        """Add the values of these units at these rows."""
        self.vector |= vector
        width = self.values.shape[1]
        index = (rows.unsqueeze(1) * width + self.places(units)).view(-1)
        self.values.view(-1).scatter_reduce_(0, index, values.reshape(-1), self.reduce)
        self.counts.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def merge(self, places: Tensor, rows: int) -> None:
        """Row i becomes part of row places[i]."""
        old, counts = self.values, self.counts
        self.values, self.counts = old[:0], counts[:0]
        self.resize(rows)
        index = places.unsqueeze(1).expand_as(old)
        self.values.scatter_reduce_(0, index, old, self.reduce)
        self.counts.scatter_add_(0, index, counts)

    def read(self) -> Tensor:
        """The values, rows by units: NaN where nothing is known."""
        values = self.values / self.counts if self.reduce == "sum" else self.values
        return values.masked_fill(self.counts == 0, math.nan)

    def summary(self) -> tuple[Tensor, Tensor]:
        """One value a row, over all units, and whether it is known."""
        there = self.counts.sum(1)
        values = getattr(self.values, self.reduce)(1)
        return values / there if self.reduce == "sum" else values, there > 0
