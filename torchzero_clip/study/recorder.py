"""Recorder: what the rules measured in every step, kept on the device and handed back at once."""

from __future__ import annotations

import csv
import weakref
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self

from torchzero_clip.attach import Attached
from torchzero_clip.core.division import UnitIds
from torchzero_clip.optimizer.chain_runner import ChainRunner
from torchzero_clip.optimizer.metrics import units_of
from torchzero_clip.study.live_file import LiveFile
from torchzero_clip.study.plot import draw
from torchzero_clip.study.table import ROW, Block, Series, Table

BLOCK = 256  # steps that wait on the device for one transfer
BLOCK_NUMBERS = 2**20  # and the most numbers, where a rule has many units
MOST_NUMBERS = 2**22  # of a history: about 50 MB


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
        live: Show the run in the lab while it trains: a page in a browser on this machine, from a
            process of its own, which gets every step after each `every` of them.

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
        if not isinstance(live, bool):
            raise TypeError(f"Recorder: live must be True or False, got {live!r}")
        self.capacity, self.callback, self.every = capacity, callback, every
        self._step = 0
        self._logged: list[tuple[str, Any]] = []
        self._waiting: list[tuple[int, Series, Any]] = []  # what is still on the device
        self._held = 0  # how many numbers that is
        self._table = Table()
        self._window = Table()  # since the last call of the callback
        self._measured: set[str] = set()  # names that came from metrics
        self._lab = LiveFile() if live else None
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
        for name in ("step", ROW):
            if name in values:
                raise ValueError(
                    f"Recorder: log takes no {name!r}, which the recorder counts itself"
                )
        self._logged += [(name, number(name, value)) for name, value in values.items()]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._step += 1
        rules = self._rules()
        for name, value in self._logged:
            self._wait({name: value}, {})
        self._logged = []
        if rules is not None and rules._records is not self._last:  # a detached handle is silent
            self._last = rules._records
            metrics = rules.metrics()
            self._measured.update(metrics)
            self._wait(metrics, units_of(rules._records))
        told = self.callback is not None or self._lab is not None
        due = told and self._step % self.every == 0
        if due or self._step - self._table.last >= BLOCK or self._held >= BLOCK_NUMBERS:
            self._flush()
        if due and self.callback is not None:
            row = self._window.merge(self._step).summary()
            self._window = Table(self._step)
            self.callback(row[-1])

    def _wait(self, values: Mapping[str, Any], units: Mapping[str, UnitIds]) -> None:
        """Keep values of this step for the next transfer."""
        for name, value in values.items():
            size = value.numel() if isinstance(value, Tensor) else 1
            if size:
                self._waiting.append((self._step, Series(name, units.get(name)), value))
                self._held += size

    def _flush(self) -> None:
        """Bring what waits on the device to the host."""
        block = without_skipped(fetch(self._waiting), self._measured)
        self._waiting, self._held = [], 0
        self._table.add(self._step, block)
        self._fit()
        if self._lab is not None:
            self._lab.show(self._table)
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

    def units(self, name: str) -> list[str]:
        """What the entries of a metric are of, in their order: names of parameters, layers, groups.

        A parameter without a name is "parameter 3 of group 0", slice 5 of one is "weight[5]".
        """
        columns = self._read().columns
        if name not in columns:
            raise ValueError(f"Recorder: units takes one of {list(columns)}, got {name!r}")
        return list(columns[name].units.values())

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write the history: entry i of a vector is name/i, and what was not there is empty.

        "step" is the last step of a row, and "stands_for" how many steps the row has.
        """
        table = self._read()
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([table.header(), *table.rows()])

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


def number(name: str, value: Any) -> float | Tensor:
    """A value that was logged: a float, or a tensor without dims that a float can hold."""
    wanted = "Recorder: log takes numbers and tensors of one element"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{wanted}, got {name} of shape {tuple(value.shape)}: log its mean, say"
            )
        if value.is_complex() or value.layout != torch.strided:
            kind = f"{value.dtype}, {value.layout}"
            raise TypeError(f"{wanted} that a float can hold, got {name} of {kind}")
        return value.detach().reshape(()).clone()
    if not isinstance(value, (int, float)):
        raise TypeError(f"{wanted}, got {name}={value!r}")
    try:
        return float(value)
    except OverflowError:  # the number itself may have too many digits to print
        raise ValueError(
            f"{wanted} that a float can hold, got {name}, an integer of "
            f"{int(value).bit_length()} bits: "
            "log its logarithm, say"
        ) from None


def without_skipped(block: Block, measured: set[str]) -> Block:
    """What was measured, less what rules made of gradients in steps that a guard skipped."""
    skipped, guards = set(), set()
    for series, _, steps, values in block:
        guard, _, name = series.name.rpartition("/")
        if name == "why" and series.name in measured:
            guards.add(guard)
            skipped |= {s for s, why in zip(steps, values[:, 0].tolist(), strict=True) if why}
    if not skipped:
        return block
    out = []
    for series, vector, steps, values in block:
        kept = list(range(len(steps)))
        if series.name in measured and series.name.rpartition("/")[0] not in guards:
            kept = [i for i, step in enumerate(steps) if step not in skipped]
        if kept:
            out.append((series, vector, [steps[i] for i in kept], values[kept]))
    return out


def fetch(waiting: list[tuple[int, Series, Any]]) -> Block:
    """For each series and shape its steps, and their values as rows, on the host."""
    groups: dict[tuple[Any, ...], tuple[list[int], list[Any]]] = {}
    for step, series, value in waiting:
        kind: tuple[Any, ...] = (series, False)
        if isinstance(value, Tensor):
            kind = (series, value.dim() > 0, value.numel(), value.device, value.dtype)
        steps, values = groups.setdefault(kind, ([], []))
        steps.append(step)
        values.append(value)
    vectors = to_host([as_vector(values) for _, values in groups.values()])
    return [
        (series, vector, steps, numbers.view(len(steps), -1))
        for ((series, vector, *_), (steps, _)), numbers in zip(groups.items(), vectors, strict=True)
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
