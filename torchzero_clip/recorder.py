"""Recorder: what the rules measured in every step, kept on the device and handed back at once."""

from __future__ import annotations

import csv
import math
import weakref
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from torchzero_clip._plot import draw
from torchzero_clip.attach import Attached
from torchzero_clip.optimizer import Modular

BLOCK = 256  # steps that wait on the device for one transfer
BLOCK_NUMBERS = 2**20  # and the most numbers, where a rule has many units
MOST_NUMBERS = 2**22  # of a history: about 50 MB
KEEPS = {"norm": "amax", "skipped": "amax", "limit": "amin"}  # by the last part; others the mean
NOTHING = {"amax": -math.inf, "amin": math.inf, "sum": 0.0}


class Recorder:
    """The history of a run: one row for each step, recorded without waiting for the device.

    From its construction on it takes the metrics after every step of the optimizer. They stay on
    the device until 256 steps are there, and then come to the host in one transfer.

    Where the history has more than `capacity` rows, rows are merged in pairs: a row then stands for
    2, 4, 8, … steps, with the largest norm, the smallest limit, and the mean of everything else.
    Where one number must stand for a vector, it is chosen in the same way.

    Args:
        optimizer: A Modular, a Clipper, or the handle that `attach` returned.
        capacity: The most rows to keep.
        callback: A function of a dict with a float for each name, such as `wandb.log`.
        every: Call it after so many steps, with what a row of them would have. Each call waits for
            the device.

    Example:
        >>> recorder = Recorder(opt)
        >>> recorder.log(loss=loss)
        >>> opt.step()
        >>> history = recorder.history()
    """

    def __init__(
        self,
        optimizer: Modular,
        *,
        capacity: int = 4096,
        callback: Callable[[dict[str, float]], Any] | None = None,
        every: int = 50,
    ) -> None:
        if not isinstance(optimizer, Modular):
            raise TypeError(
                "Recorder: takes a Modular, a Clipper or the handle that attach returned, got "
                f"{type(optimizer).__name__}"
            )
        for name, value, least in (("capacity", capacity, 2), ("every", every, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"Recorder: {name} must be an integer at least {least}, got {value!r}"
                )
        if callback is not None and not callable(callback):
            raise TypeError(f"Recorder: callback must be a function of a dict, got {callback!r}")
        self.capacity, self.callback, self.every = capacity, callback, every
        self._step = 0
        self._logged: list[tuple[str, Any]] = []
        self._waiting: list[tuple[int, str, Any]] = []  # what is still on the device
        self._held = 0  # how many numbers that is
        self._table = Table()
        self._window = Table()  # since the last call of the callback
        self._rules = weakref.ref(optimizer)
        self._last: object = None  # the records that the last row came from
        steps = optimizer._optimizer() if isinstance(optimizer, Attached) else optimizer
        if steps is None:
            raise RuntimeError("Recorder: the optimizer that this handle was attached to is gone")
        after = torch.compiler.disable(self._after_step)  # a compiled step does not trace this
        self._hook = steps.register_step_post_hook(after)

    # ------------------------------------------------------------------ recording

    def log(self, **values: float | Tensor) -> None:
        """Add numbers to the row of the next step; tensors stay on the device.

        Call it before `opt.step()`. What is logged more than once for a step is averaged, as with
        the losses of the parts of a batch.
        """
        for name, value in values.items():
            if name == "step":
                raise ValueError("Recorder: log takes no 'step', which the recorder counts itself")
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"Recorder: log takes numbers and tensors of one element, got {name} of "
                        f"shape {tuple(value.shape)}: log its mean, say"
                    )
                value = value.detach().reshape(()).clone()
            elif not isinstance(value, (int, float)):
                raise TypeError(
                    f"Recorder: log takes numbers and tensors of one element, got {name}={value!r}"
                )
            self._logged.append((name, value))

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        rules = self._rules()
        if rules is not None and rules._records is not self._last:  # a detached handle is silent
            self._last = rules._records
            self._logged += rules.metrics().items()
        for name, value in self._logged:
            size = value.numel() if isinstance(value, Tensor) else 1
            if size:
                self._waiting.append((self._step, name, value))
                self._held += size
        self._logged = []
        due = self.callback is not None and self._step % self.every == 0
        if due or self._step - self._table.last >= BLOCK or self._held >= BLOCK_NUMBERS:
            self._flush()
        if due and self.callback is not None:
            row = self._window.merge(self._step).summary()
            self._window = Table(self._step)
            self.callback(row[-1])

    def _flush(self) -> None:
        """Bring what waits on the device to the host."""
        block = fetch(self._waiting)
        self._waiting, self._held = [], 0
        self._table.add(self._step, block)
        self._fit()
        if self.callback is not None:
            self._window.add(self._step, block)
            self._window.merge(self._step)

    def _fit(self) -> None:
        table = self._table
        while len(table) > self.capacity or (table.numbers > MOST_NUMBERS and len(table) > 1):
            table.merge(2 * table.stride)

    def remove(self) -> None:
        """End the recording; the history stays."""
        self._hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ------------------------------------------------------------------ reading

    def _read(self) -> Table:
        self._flush()
        return self._table

    def history(self) -> dict[str, Any]:
        """A list for each name, with an entry for each row, and the last step of each as "step".

        Entries are floats, or lists of floats for metrics that are vectors. NaN stands where a name
        was not there, such as in a step that a guard skipped.
        """
        table = self._read()
        out: dict[str, Any] = {"step": table.steps.tolist()}
        for name, column in table.columns.items():
            values = column.read()
            out[name] = (values if column.vector else values[:, 0]).tolist()
        return out

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the history: entry i of a vector is name/i, and what was not there is empty."""
        table = self._read()
        header, cells = ["step"], [[str(step) for step in table.steps.tolist()]]
        for name, column in table.columns.items():
            values, there = column.read().T.tolist(), (column.counts > 0).T.tolist()
            for i, (entries, known) in enumerate(zip(values, there, strict=True)):
                header.append(f"{name}/{i}" if column.vector else name)
                cells.append([repr(v) if k else "" for v, k in zip(entries, known, strict=True)])
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *zip(*cells, strict=True)])

    def to_tensorboard(self, writer: Any) -> None:
        """Write the history to a SummaryWriter, of a vector one number: see the class."""
        for row in self._read().summary():
            step = int(row.pop("step"))
            for name, value in row.items():
                writer.add_scalar(name, value, step)

    def plot(self, path: str | PathLike[str], title: str | None = None) -> None:
        """Draw the history to a file: .png, .svg or .pdf. Needs matplotlib.

        Norms and limits of each rule, or a map of its units; how often it clipped; and everything
        that was logged.
        """
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                'Recorder: plot needs matplotlib: pip install "torchzero-clip[plot]"',
                name="matplotlib",
            ) from None
        draw(self._read(), path, title)

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The history so far, as numbers and tensors on the host."""
        return {"table": self._read().state_dict(), "window": self._window.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after the history that `state_dict` gave; what was recorded here is forgotten."""
        if state_dict.keys() != {"table", "window"}:
            raise ValueError(
                "Recorder: load_state_dict takes what state_dict of a Recorder gave, got a dict of "
                f"{list(state_dict)}"
            )
        table, window = [Table.load(state_dict[name]) for name in ("table", "window")]
        self._table, self._step = table, table.last
        self._window = window if window.last == table.last else Table(table.last)
        self._waiting, self._held, self._logged = [], 0, []
        self._fit()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._step} steps, capacity={self.capacity})"


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

    def add(self, last: int, block: list[tuple[str, bool, list[int], Tensor]]) -> None:
        """Add the steps up to `last`, and what was measured in them."""
        rows, first = len(self), self.last + 1
        self.steps = torch.cat([self.steps, torch.arange(first, last + 1)])
        self.last = last
        for name, _, _, _ in block:
            if name not in self.columns:
                self.columns[name] = Column(KEEPS.get(name.split("/")[-1], "sum"))
        for column in self.columns.values():
            column.resize(len(self), column.values.shape[1])
        for name, vector, steps, values in block:
            places = torch.tensor(steps) - first + rows
            self.columns[name].put(places, values, vector)
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
            column.vector = parts["vector"]
            column.values, column.counts = [parts[k].cpu().clone() for k in ("values", "counts")]
        return table


class Column:
    """One metric: for every row and unit an extreme or the sum, and of how many steps."""

    def __init__(self, reduce: str) -> None:
        self.reduce, self.vector = reduce, False
        self.values = torch.empty(0, 0, dtype=torch.float64)
        self.counts = torch.empty(0, 0, dtype=torch.int32)

    def resize(self, rows: int, width: int) -> None:
        """Make room for more rows or units, in which nothing is known."""
        grow = (0, width - self.values.shape[1], 0, rows - len(self.values))
        self.values = torch.nn.functional.pad(self.values, grow, value=NOTHING[self.reduce])
        self.counts = torch.nn.functional.pad(self.counts, grow)

    def put(self, places: Tensor, values: Tensor, vector: bool) -> None:
        """Add values at these rows."""
        rows, width = self.values.shape
        self.vector |= vector
        self.resize(rows, max(width, values.shape[1]))
        part, counts = [t[:, : values.shape[1]] for t in (self.values, self.counts)]
        index = places.unsqueeze(1).expand_as(values)
        part.scatter_reduce_(0, index, values, self.reduce)
        counts.scatter_add_(0, index, torch.ones_like(values, dtype=torch.int32))

    def merge(self, places: Tensor, rows: int) -> None:
        """Row i becomes part of row places[i]."""
        old, counts = self.values, self.counts
        self.values, self.counts = old[:0], counts[:0]
        self.resize(rows, old.shape[1])
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


def fetch(waiting: list[tuple[int, str, Any]]) -> list[tuple[str, bool, list[int], Tensor]]:
    """For each name and shape its steps, and their values as rows, on the host."""
    groups: dict[tuple[Any, ...], tuple[list[int], list[Any]]] = {}
    for step, name, value in waiting:
        kind: tuple[Any, ...] = (name, False)
        if isinstance(value, Tensor):
            kind = (name, value.dim() > 0, value.numel(), value.device, value.dtype)
        steps, values = groups.setdefault(kind, ([], []))
        steps.append(step)
        values.append(value)
    vectors = to_host([as_vector(values) for _, values in groups.values()])
    return [
        (name, vector, steps, numbers.view(len(steps), -1))
        for ((name, vector, *_), (steps, _)), numbers in zip(groups.items(), vectors, strict=True)
    ]


def as_vector(values: list[Any]) -> Tensor:
    """One vector of numbers, or of tensors of one dtype: in float32 if that holds them."""
    if not isinstance(values[0], Tensor):
        return torch.tensor(values, dtype=torch.float64)
    flat = torch.cat([value.reshape(-1) for value in values])
    small = flat.dtype in (torch.bool, torch.float16, torch.bfloat16)
    return flat.to(torch.float32) if small else flat


def to_host(vectors: list[Tensor]) -> list[Tensor]:
    """The vectors in float64 on the host, with one transfer for each device and dtype."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, vector in enumerate(vectors):
        kinds.setdefault((vector.device, vector.dtype), []).append(i)
    out = list(vectors)
    for members in kinds.values():
        joined = torch.cat([vectors[i] for i in members]).cpu().to(torch.float64)
        parts = joined.split([len(vectors[i]) for i in members])
        for i, part in zip(members, parts, strict=True):
            out[i] = part
    return out
