"""The class `Recorder`, which records metrics without synchronizing with the GPU."""

from __future__ import annotations

import csv
import weakref
from collections.abc import Callable, Mapping
from numbers import Real
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from torchzero_clip.attach import Attached
from torchzero_clip.core.division import UnitIds
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.layout import full
from torchzero_clip.optimizer.chain_runner import ChainRunner
from torchzero_clip.optimizer.metrics import units_of
from torchzero_clip.study.live_file import LiveFile
from torchzero_clip.study.plot import draw
from torchzero_clip.study.table import ROW, Block, Series, Table

BLOCK = 256
"""The number of steps between two transfers. Until then, values stay on the device."""
BLOCK_NUMBERS = 2**20
"""The number of values after which a transfer comes earlier, if a rule has many units."""
MOST_NUMBERS = 2**22
"""The largest number of values in a history. So many values need about 50 MB."""


class Recorder:
    """Record the metrics of every optimizer step, without synchronizing with the GPU.

    The recorder reads `metrics()` after every step of the optimizer. The values stay on the device
    for 256 steps. Then one transfer copies them to the host. Read the values with `history`, or
    write them with `to_csv`, `to_tensorboard` or `plot`.

    If the history has more than `capacity` rows, the recorder merges every two rows into one row. A
    row then stands for 2, 4, 8, … steps. It has the largest norm of these steps, the smallest
    limit, and the mean of all other metrics. If a vector must become a single number, the same
    reductions are used.

    A `Recorder` is also a context manager. At the end of the block it calls `remove`.

    Args:
        optimizer: A `Modular`, a `Clipper`, or the handle that `attach` returned.
        capacity: The largest number of rows.
        callback: A function that accepts a dict of floats, such as `wandb.log`. The recorder calls
            it every `every` steps, with the merged metrics of these steps.
        every: The number of steps between two calls of `callback`, or between two updates of the
            lab. A call or an update synchronizes with the GPU once.
        live: Whether to show the run in the lab during training. The lab is a page in a browser on
            this machine. It runs in another process.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, Recorder, ZClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ZClip(), Adam(), LR(1e-3))
        >>> recorder = Recorder(opt)
        >>> loss = model(torch.randn(64, 10)).square().mean()
        >>> loss.backward()
        >>> recorder.log(loss=loss)
        >>> opt.step()
        >>> history = recorder.history()
    """

    def __init__(
        self,
        optimizer: ChainRunner,
        *,
        capacity: int = 4096,
        callback: Callable[[dict[str, float]], Any] | None = None,
        every: int = 50,
        live: bool = False,
    ) -> None:
        if not isinstance(optimizer, ChainRunner):
            raise TypeError(
                "Recorder: optimizer must be a Modular, a Clipper or the handle that attach "
                f"returned, got {type(optimizer).__name__}"
            )
        for name, value, least in (("capacity", capacity, 2), ("every", every, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"Recorder: {name} must be an integer of at least {least}, got {value!r}"
                )
        if callback is not None and not callable(callback):
            raise TypeError(f"Recorder: callback must be a function or None, got {callback!r}")
        if not isinstance(live, bool):
            raise TypeError(f"Recorder: live= must be True or False, got {live!r}")
        self.capacity = capacity
        self.callback = callback
        self.every = every
        self._step = 0
        self._logged: list[tuple[str, Any]] = []  # values for the next step
        self._waiting: list[tuple[int, Series, Any]] = []  # values that are still on the device
        self._waiting_numbers = 0  # the number of elements of these values
        self._table = Table()
        self._window = Table()  # the steps since the last call of the callback
        self._measured: set[str] = set()  # the names that are metrics, and not logged values
        self._lab = LiveFile() if live else None
        self._rules = weakref.ref(optimizer)
        self._last_records: object = None  # the records of the rules in the last row
        steps = optimizer._optimizer() if isinstance(optimizer, Attached) else optimizer
        if steps is None:
            raise RuntimeError(
                "Recorder: the optimizer of this handle no longer exists: keep a reference to "
                "the optimizer"
            )
        after = torch.compiler.disable(self._after_step)  # a compiled step does not trace this
        self._hook = steps.register_step_post_hook(after)

    # ------------------------------------------------------------------ recording

    def log(self, **values: float | Tensor) -> None:
        """Add values to the row of the next optimizer step, for example `recorder.log(loss=loss)`.

        Call this method before `opt.step()`. You can log a name several times before a step, for
        example the loss of each part of a batch. The row then has the mean.

        Args:
            **values: Numbers, or tensors with one element, by name. Tensors stay on their device.
        """
        for name in ("step", ROW):
            if name in values:
                raise ValueError(
                    f"Recorder: the method log does not accept the name {name!r}, because "
                    "Recorder itself uses this name"
                )
        self._logged += [(name, number(name, value)) for name, value in values.items()]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        rules = self._rules()
        for name, value in self._logged:
            self._keep({name: value}, {})
        self._logged = []
        # a detached handle has no new records
        if rules is not None and rules._records is not self._last_records:
            self._last_records = rules._records
            metrics = rules.metrics()
            self._measured.update(metrics)
            self._keep(metrics, units_of(rules._records))
        has_reader = self.callback is not None or self._lab is not None
        is_due = has_reader and self._step % self.every == 0
        is_full = self._step - self._table.last >= BLOCK or self._waiting_numbers >= BLOCK_NUMBERS
        if is_due or is_full:
            self._flush()
        if is_due and self.callback is not None:
            row = self._window.merge(self._step).summary()
            self._window = Table(self._step)
            self.callback(row[-1])

    def _keep(self, values: Mapping[str, Any], units: Mapping[str, UnitIds]) -> None:
        """Keep the values of this step on the device until the next transfer."""
        for name, value in values.items():
            size = value.numel() if isinstance(value, Tensor) else 1
            if size:
                self._waiting.append((self._step, Series(name, units.get(name)), value))
                self._waiting_numbers += size

    def _flush(self) -> None:
        """Copy the values that are still on the device to the host."""
        block = without_skipped(fetch(self._waiting), self._measured)
        self._waiting = []
        self._waiting_numbers = 0
        self._table.add(self._step, block)
        self._fit()
        if self._lab is not None:
            self._lab.show(self._table)
        if self.callback is not None:
            self._window.add(self._step, block)
            self._window.merge(self._step)

    def _fit(self) -> None:
        """Merge rows until the table fits into its capacity."""
        table = self._table
        while len(table) > self.capacity or (table.numbers > MOST_NUMBERS and len(table) > 1):
            table.merge(2 * table.stride)

    def remove(self) -> None:
        """Stop recording. The history stays."""
        self._hook.remove()
        if self._lab is not None:
            self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ------------------------------------------------------------------ reading

    def _read(self) -> Table:
        self._flush()
        return self._table

    def history(self) -> dict[str, Any]:
        """Return the history as a dict with a list for each metric and for each logged name.

        Each list has one element for each row: a float, or a list of floats if the metric is a
        vector. Missing values are NaN, for example the metrics of rules in a step that a guard
        skipped. The list "step" has, for each row, the number of the last step.

        This method synchronizes with the GPU.
        """
        table = self._read()
        history: dict[str, Any] = {"step": table.steps.tolist()}
        for name, column in table.columns.items():
            values = column.read()
            history[name] = (values if column.vector else values[:, 0]).tolist()
        return history

    def units(self, name: str) -> list[str]:
        """Return the names of the units of a metric, in the order of its elements.

        A unit is a slice, a parameter, a layer or a group. A parameter without a name gets a name
        such as "parameter 3 of group 0". Slice 5 of a parameter gets a name such as "weight[5]".

        A single number that belongs to no group gets the name "0". For example, the norm of a rule
        with `dim="global"` may cover several groups, so it does not have the name of a group.

        Args:
            name: The name of the metric, such as "ClipNorm/norm".
        """
        columns = self._read().columns
        if name not in columns:
            raise ValueError(f"Recorder: name must be one of {list(columns)}, got {name!r}")
        return list(columns[name].units.values())

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the history to a CSV file for `Trace.read`, `simulate` and the lab.

        Element i of a vector is in the column name/i. Missing values are empty cells. The column
        "step" has the number of the last step of each row. The column "stands_for" has the number
        of steps of each row.

        Args:
            path: The file.
        """
        table = self._read()
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([table.header(), *table.rows()])

    def to_tensorboard(self, writer: Any) -> None:
        """Write the history to TensorBoard.

        Each vector is reduced to one number: the largest norm, the smallest limit, or the mean.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`.
        """
        for row in self._read().summary():
            step = int(row.pop("step"))
            for name, value in row.items():
                writer.add_scalar(name, value, step)

    def plot(self, path: str | PathLike[str], title: str | None = None) -> None:
        """Draw the history. Needs matplotlib.

        The picture shows all logged values, the norm and the limit of each rule, and how often each
        rule clipped. For a rule with many units, it shows a map of the ratios of norm and limit.

        Args:
            path: The file. Its name ends in .png, .svg or .pdf.
            title: A title above the picture.
        """
        draw(self._read(), path, title)

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the history so far for a checkpoint, as plain data and tensors on the host."""
        return {"table": self._read().state_dict(), "window": self._window.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history with a saved history. New steps are added after the saved steps.

        Args:
            state_dict: The result of `state_dict`.
        """
        if state_dict.keys() != {"table", "window"}:
            raise ValueError(
                "Recorder: load_state_dict needs the result of Recorder.state_dict(), got a dict "
                f"with the keys {list(state_dict)}"
            )
        table = Table.load(state_dict["table"])
        window = Table.load(state_dict["window"])
        self._table = table
        self._step = table.last
        self._window = window if window.last == table.last else Table(table.last)
        self._waiting = []
        self._waiting_numbers = 0
        self._logged = []
        self._fit()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(self._step, 'step')}, capacity={self.capacity})"


def number(name: str, value: Any) -> float | Tensor:
    """Check a logged value, and return it as a float or as a tensor without dims."""
    wanted = "Recorder: log accepts numbers and tensors with one element"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{wanted}, got {name} of shape {tuple(value.shape)}: log one number, such as "
                f"{name}.mean()"
            )
        if value.is_complex() or value.layout != torch.strided:
            kind = f"{value.dtype}, {value.layout}"
            raise TypeError(f"{wanted} that can be converted to float, got {name} of {kind}")
        return full(value.detach()).reshape(()).clone()
    is_number = isinstance(value, Real)  # NumPy's numbers are Real as well
    if not is_number:
        raise TypeError(f"{wanted}, got {name}={value!r}")
    try:
        return float(value)
    except OverflowError:  # the number itself may have too many digits to print
        raise ValueError(
            f"{wanted} that can be converted to float, got an integer {name} of "
            f"{int(value).bit_length()} bits: pass a smaller number, such as math.log({name})"
        ) from None


def without_skipped(block: Block, measured: set[str]) -> Block:
    """Remove the metrics of rules from steps that a guard skipped. Keep logged values.

    Args:
        block: The values of some steps.
        measured: The names of the metrics, in contrast to logged values.
    """
    skipped_steps = set()
    guards = set()
    for series, _, steps, values in block:
        guard, _, name = series.name.rpartition("/")
        if name == "why" and series.name in measured:
            guards.add(guard)
            pairs = zip(steps, values[:, 0].tolist(), strict=True)
            skipped_steps |= {step for step, why in pairs if why}
    if not skipped_steps:
        return block
    remaining = []
    for series, is_vector, steps, values in block:
        rows = list(range(len(steps)))
        if series.name in measured and series.name.rpartition("/")[0] not in guards:
            rows = [i for i, step in enumerate(steps) if step not in skipped_steps]
        if rows:
            remaining.append((series, is_vector, [steps[i] for i in rows], values[rows]))
    return remaining


def fetch(waiting: list[tuple[int, Series, Any]]) -> Block:
    """Copy values to the host, and group them by series and shape."""
    vectors = to_host(
        [
            value.reshape(-1)
            if isinstance(value, Tensor)
            else torch.tensor([value], dtype=torch.float64)
            for _, _, value in waiting
        ]
    )
    groups: dict[tuple[Series, bool, int], tuple[list[int], list[Tensor]]] = {}
    for (step, series, value), vector in zip(waiting, vectors, strict=True):
        is_vector = isinstance(value, Tensor) and value.dim() > 0
        steps, rows = groups.setdefault((series, is_vector, len(vector)), ([], []))
        steps.append(step)
        rows.append(vector)
    return [
        (series, is_vector, steps, torch.stack(rows))
        for (series, is_vector, _), (steps, rows) in groups.items()
    ]


def to_host(vectors: list[Tensor]) -> list[Tensor]:
    """Return the vectors in float64 on the host, with one transfer for each device and dtype.

    Vectors in a smaller dtype than float32 become float32, because fewer dtypes need fewer
    transfers.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, vector in enumerate(vectors):
        is_small = vector.dtype in (torch.bool, torch.float16, torch.bfloat16)
        dtype = torch.float32 if is_small else vector.dtype
        kinds.setdefault((vector.device, dtype), []).append(i)
    copied = list(vectors)
    for (_, dtype), members in kinds.items():
        joined = torch.cat([vectors[i] for i in members]).to(dtype).cpu().to(torch.float64)
        parts = joined.split([len(vectors[i]) for i in members])
        for i, part in zip(members, parts, strict=True):
            copied[i] = part
    return copied
