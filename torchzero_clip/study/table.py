"""The metrics of a recorded run as a table: one row for each step, or for several merged steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.division import UnitIds
from torchzero_clip.floats import KEEPS

ROW = "stands_for"
"""The name of the column, in a file, for the number of steps of each row."""
NOTHING = {"amax": -math.inf, "amin": math.inf, "sum": 0.0}
"""For each reduction, its neutral element: reducing a value with it returns the value."""

Entries: TypeAlias = dict[tuple[int, int, int], str]
"""The units of the elements of a vector. Each unit has a key for sorting, and a name."""


class Series(NamedTuple):
    """A metric, together with the units for which it was measured.

    Attributes:
        name: The name of the metric.
        ids: The units, or None if the metric has no units.
    """

    name: str
    ids: UnitIds | None

    def entries(self, width: int) -> Entries:
        """Return the unit of each of `width` elements."""
        if self.ids is not None:
            return self.ids.names()
        return {(-1, -1, i): str(i) for i in range(width)}


Block: TypeAlias = "list[tuple[Series, bool, list[int], Tensor]]"
"""Values of some steps, as a list with an item for each series.

An item has the series, whether its values are vectors, the steps, and a tensor with one row of
values for each step.
"""


class Table:
    """A table with one column for each metric.

    Each row merges `stride` steps. The last row may have fewer steps.

    Args:
        last: The number of the step before the first row.

    Attributes:
        stride: The number of steps in a row.
        last: The number of the last step.
        steps: The number of the last step in each row.
        columns: The columns, by the name of the metric.
    """

    def __init__(self, last: int = 0) -> None:
        self.stride = 1
        self.last = last
        self.steps = torch.empty(0, dtype=torch.int64)
        self.columns: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def numbers(self) -> int:
        """The number of values in all columns."""
        return sum(column.values.numel() for column in self.columns.values())

    def add(self, last: int, block: Block) -> None:
        """Add steps and the values of these steps.

        Args:
            last: The number of the last step to add.
            block: The values.
        """
        old_rows = len(self)
        first = self.last + 1
        self.steps = torch.cat([self.steps, torch.arange(first, last + 1)])
        self.last = last
        for series, _, _, values in block:
            name = series.name
            if name not in self.columns:
                self.columns[name] = Column(KEEPS.get(name.split("/")[-1], "sum"))
            self.columns[name].widen(series.entries(values.shape[1]))
        for column in self.columns.values():
            column.resize(len(self))
        for series, is_vector, steps, values in block:
            rows = torch.tensor(steps) - first + old_rows
            entries = series.entries(values.shape[1])
            self.columns[series.name].put(rows, entries, values, is_vector)
        self.merge(self.stride)

    def merge(self, stride: int) -> Table:
        """Merge rows until each row has `stride` steps, and return this table."""
        self.stride = stride
        keys, places = torch.unique_consecutive((self.steps - 1) // stride, return_inverse=True)
        if len(keys) < len(self):
            for column in self.columns.values():
                column.merge(places, len(keys))
            last_steps = torch.zeros(len(keys), dtype=torch.int64)
            self.steps = last_steps.scatter_reduce(0, places, self.steps, "amax")
        return self

    def counts(self) -> Tensor:
        """Return the number of steps in each row."""
        if not len(self):
            return self.steps
        before_first = (self.steps[:1] - 1) // self.stride * self.stride
        return self.steps.diff(prepend=before_first)

    def header(self, named: bool = False) -> list[str]:
        """Return the column names for a file.

        Args:
            named: Whether a vector has columns such as name/unit. Otherwise element i is in the
                column name/i.
        """
        names = ["step", ROW]
        for name, column in self.columns.items():
            units = [*column.units.values()] if named else range(len(column.units))
            names += [f"{name}/{unit}" for unit in units] if column.vector else [name]
        return names

    def rows(self, start: int = 0) -> list[tuple[str, ...]]:
        """Return the cells for a file, beginning at row `start`. Unknown values are empty cells."""
        columns = [[str(n) for n in x[start:].tolist()] for x in (self.steps, self.counts())]
        for column in self.columns.values():
            all_values = column.read()[start:].T.tolist()
            all_known = (column.counts[start:] > 0).T.tolist()
            for values, known in zip(all_values, all_known, strict=True):
                pairs = zip(values, known, strict=True)
                columns.append([repr(value) if is_known else "" for value, is_known in pairs])
        return [*zip(*columns, strict=True)]

    def summary(self) -> list[dict[str, float]]:
        """Return a dict for each row. It has one float for each metric with a known value."""
        rows = [{"step": float(step)} for step in self.steps.tolist()]
        for name, column in self.columns.items():
            values, known = column.summary()
            for row, value, is_known in zip(rows, values.tolist(), known.tolist(), strict=True):
                if is_known:
                    row[name] = value
        return rows

    def state_dict(self) -> dict[str, Any]:
        columns = {
            name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in vars(column).items()}
            for name, column in self.columns.items()
        }
        return {"stride": self.stride, "last": self.last, "steps": self.steps, "columns": columns}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Table:
        """Return the table from a saved `state_dict`."""
        table = cls(state["last"])
        table.stride = state["stride"]
        table.steps = state["steps"].cpu()
        for name, saved in state["columns"].items():
            column = Column(saved["reduce"])
            column.vector = saved["vector"]
            column.units = dict(saved["units"])
            column.values = saved["values"].cpu().clone()
            column.counts = saved["counts"].cpu().clone()
            table.columns[name] = column
        return table


class Column:
    """The values of one metric for each row and unit, and the number of steps with a value.

    The attributes are the keys of the column in a state dict.

    Args:
        reduce: The reduction of several steps to one value: "amax", "amin", or "sum" for the mean.

    Attributes:
        reduce: The reduction.
        vector: Whether the metric is a vector in any row.
        units: The units, sorted. So they do not depend on the order in which they were added.
        values: The reduced values, with shape (rows, units).
        counts: The number of steps with a value, with shape (rows, units).
    """

    def __init__(self, reduce: str) -> None:
        self.reduce = reduce
        self.vector = False
        self.units: Entries = {}
        self.values = torch.empty(0, 0, dtype=torch.float64)
        self.counts = torch.empty(0, 0, dtype=torch.int32)

    def resize(self, rows: int) -> None:
        """Add rows without values, until there are `rows` rows."""
        padding = (0, 0, 0, rows - len(self.values))
        self.values = torch.nn.functional.pad(self.values, padding, value=NOTHING[self.reduce])
        self.counts = torch.nn.functional.pad(self.counts, padding)

    def widen(self, units: Entries) -> None:
        """Add units without values, and keep the units sorted."""
        if units.keys() <= self.units.keys():
            return
        old_units = list(self.units)
        all_units = {**self.units, **units}
        self.units = {unit: all_units[unit] for unit in sorted(all_units)}
        self.vector |= len(all_units) > 1
        places = self.places(old_units)
        shape = (len(self.values), len(all_units))
        values = self.values.new_full(shape, NOTHING[self.reduce])
        self.values = values.index_copy(1, places, self.values)
        self.counts = self.counts.new_zeros(shape).index_copy(1, places, self.counts)

    def places(self, units: Iterable[tuple[int, int, int]]) -> Tensor:
        """Return the column index of each unit."""
        place = {unit: i for i, unit in enumerate(self.units)}
        return torch.tensor([place[unit] for unit in units], dtype=torch.int64)

    def put(self, rows: Tensor, units: Entries, values: Tensor, is_vector: bool) -> None:
        """Add values for some rows and units.

        Args:
            rows: The row of each row of `values`.
            units: The unit of each column of `values`.
            values: The values.
            is_vector: Whether the metric is a vector.
        """
        self.vector |= is_vector
        width = self.values.shape[1]
        index = (rows.unsqueeze(1) * width + self.places(units)).view(-1)
        self.values.view(-1).scatter_reduce_(0, index, values.reshape(-1), self.reduce)
        self.counts.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))

    def merge(self, places: Tensor, rows: int) -> None:
        """Merge rows into `rows` rows. Row i becomes a part of row places[i]."""
        old_values = self.values
        old_counts = self.counts
        self.values = old_values[:0]
        self.counts = old_counts[:0]
        self.resize(rows)
        index = places.unsqueeze(1).expand_as(old_values)
        self.values.scatter_reduce_(0, index, old_values, self.reduce)
        self.counts.scatter_add_(0, index, old_counts)

    def read(self) -> Tensor:
        """Return the values, with shape (rows, units). Unknown values are NaN."""
        values = self.values / self.counts if self.reduce == "sum" else self.values
        return values.masked_fill(self.counts == 0, math.nan)

    def summary(self) -> tuple[Tensor, Tensor]:
        """Return one value for each row, reduced over all units, and whether the value is known."""
        counts = self.counts.sum(1)
        values: Tensor = getattr(self.values, self.reduce)(1)
        if self.reduce == "sum":
            values = values / counts
        return values, counts > 0


def increases(counts: Tensor) -> Tensor:
    """Return by how much a count has increased in each row. Unknown counts change nothing."""
    total = counts.nan_to_num(0).cummax(0).values
    return total.diff(prepend=total.new_zeros(1))
