"""The class `Trace`: the gradient norms of a run, in memory or in a file."""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import Self

from torchzero_clip.core.plurals import counted
from torchzero_clip.floats import GUARD
from torchzero_clip.study.logs import Log, norms_of, read, warn_of_parts
from torchzero_clip.study.recorder import Recorder
from torchzero_clip.study.table import ROW

MOST_STEPS = 2**53
"""The largest step number. float64 cannot represent all larger integers."""


class Trace:
    """The gradient norms of a run, and other values that were logged in the same steps.

    `Trace.read(path)` reads a trace from a log file, and `Trace.of(recorder)` makes one from a
    `Recorder`. Pass a trace to `simulate`.

    Args:
        norms: The norms, with one row for each step and one column for each unit. A unit is
            everything that one norm covers: a tensor, a layer, a group or the model.
        names: The names of the units. Rules with `dim="layer"` need the names of parameters.
        known: A bool tensor with the shape of `norms`. An element is False if the unit had no
            gradient in the step. The default is True everywhere.
        logged: Other values by name, with one value for each step. NaN stands for a missing value.
            The value "spike" is 1 if the gradient of the step is known to be bad.
        stride: The number of steps in each row. If a row has several steps, its norms are the
            largest norms of these steps.
        steps: The step number of each row. If a row has several steps, it is the number of the last
            one. The default counts from 1.

    Attributes:
        norms: The norms in float64, on the CPU.
        names: The names of the units.
        known: A bool tensor that is True for each norm that is known.
        logged: The other values, in float64 on the CPU.
        stride: The number of steps in each row.
        steps: The number of the last step of each row.

    Example:
        >>> import torch
        >>> from torchzero_clip import Trace
        >>> trace = Trace(torch.rand(100, 2), ["0.weight", "0.bias"])
        >>> print(trace)
        Trace(100 steps, 2 units)
    """

    def __init__(
        self,
        norms: Tensor,
        names: Sequence[str] | None = None,
        known: Tensor | None = None,
        logged: Mapping[str, Tensor] | None = None,
        stride: int = 1,
        steps: Tensor | None = None,
    ) -> None:
        if norms.dim() != 2 or not norms.numel():
            raise ValueError(
                "Trace: norms must be a matrix with one row per step and one column per norm, got "
                f"shape {tuple(norms.shape)}: for one norm per step, pass norms[:, None]"
            )
        self.norms = norms.detach().cpu().to(torch.float64)
        self.names = [str(i) for i in range(norms.shape[1])] if names is None else list(names)
        if len(self.names) != norms.shape[1]:
            raise ValueError(
                f"Trace: the number of names must be the number of columns of norms, "
                f"{norms.shape[1]}, got {len(self.names)} names"
            )
        self.known = torch.ones_like(self.norms, dtype=torch.bool) if known is None else known
        self.logged = {name: x.detach().cpu().double() for name, x in (logged or {}).items()}
        self.stride = stride
        counted = torch.arange(1, len(norms) + 1) * stride
        self.steps = counted if steps is None else steps.detach().cpu().long()

    def __len__(self) -> int:
        return len(self.norms)

    def __repr__(self) -> str:
        return f"Trace({counted(len(self), 'step')}, {counted(len(self.names), 'unit')})"

    @property
    def total(self) -> Tensor:
        """The global norm of each row, over all units."""
        return norm_of_all(self.norms.where(self.known, 0.0))

    @property
    def median(self) -> float:
        """The median of the finite global norms, or NaN if there are none."""
        total = self.total
        return total.where(total.isfinite(), math.nan).nanmedian().item()

    @property
    def spikes(self) -> Tensor | None:
        """For each row, whether a gradient is known to be bad. None if "spike" is not logged."""
        return self.logged["spike"] > 0 if "spike" in self.logged else None

    @classmethod
    def of(cls, recorder: Recorder, name: str | None = None) -> Self:
        """Return the trace of a recorded run.

        Args:
            recorder: The recorder.
            name: The name of the norms, such as "ZClip/norm". By default, the norms of the first
                rule are used. If this rule is inside a rule such as `Partition`, together with
                other rules, a warning lists the norms.
        """
        table = recorder._read()
        columns = {"step": table.steps.double()}
        known: dict[str, Tensor] = {}
        for key, column in table.columns.items():
            names = [f"{key}/{unit}" for unit in column.units.values()] if column.vector else [key]
            columns.update(zip(names, column.read().unbind(1), strict=True))
            known.update(zip(names, (column.counts > 0).unbind(1), strict=True))
        if name is None:
            names = norms_of(columns)
            warn_of_parts(names)
            name = [*names, "norm"][0]
        return cls._from_columns(columns, known, name)

    @classmethod
    def read(cls, path: str | PathLike[str], name: str | None = None) -> Self:
        """Read a trace from a log file.

        `Recorder.to_csv` and `write` write such files. A file may be compressed as ".csv.gz". Logs
        of other programs work too, if they have a column such as "grad_norm". They can be CSV files
        (including the exports of TensorBoard and Weights & Biases), files with one JSON object in
        each line, or the trainer_state.json of a Hugging Face Trainer.

        If a program was killed while it wrote the file, the last line may be incomplete. If the
        last line has no newline, this method warns. It skips the line unless the line has all
        cells.

        Rows without a norm are skipped. If a step occurs in several rows, the last row counts. In
        a file of a `Recorder` or of `write`, each row is a step, and its norm may be unknown.

        The column "stands_for" has the number of steps of each row. In a file without this column,
        the number of steps is the median difference between two consecutive step numbers.

        Args:
            path: The file.
            name: The column of the norms. By default, the norms of the first rule are used, or the
                column whose name looks most like a gradient norm. If this rule is inside a rule
                such as `Partition`, together with other rules, a warning lists the columns.
        """
        log = read(Path(path))
        if name is None:
            warn_of_parts(log.norms)
        return cls.from_log(log, name)

    @classmethod
    def from_log(cls, log: Log, name: str | None = None) -> Self:
        """Return the trace in a log. `name` is the column of the norms, as in `read`."""
        name = log.choose(name)
        return cls._from_columns(*log.columns(name), name)

    @classmethod
    def _from_columns(
        cls, columns: Mapping[str, Tensor], known: Mapping[str, Tensor], name: str
    ) -> Self:
        units = [key for key in columns if key == name or key.startswith(f"{name}/")]
        if not units:
            raise ValueError(
                f"Trace: there is no column {name!r}; the columns are {list(columns)}. To record "
                'the norms of gradients, add ClipNorm(math.inf, name="raw") at the start of the '
                "chain"
            )
        steps = columns.get("step")
        if steps is not None and not (steps.abs() <= MOST_STEPS).all():
            steps = None  # NaN, or numbers that cannot be counts of steps
        measured = {"norm", "limit", "factor", "clipped", *GUARD}
        return cls(
            torch.stack([columns[key] for key in units], 1),
            [key[len(name) + 1 :] or "0" for key in units],
            torch.stack([known[key] for key in units], 1),
            {
                key: values
                for key, values in columns.items()
                if key not in (*units, "step", ROW) and not set(key.split("/")) & measured
            },
            stride_of(steps, columns.get(ROW)),
            steps,
        )

    def part(self, start: int, end: int | None = None) -> Self:
        """Return a trace with the rows from `start` to `end`, like a slice of a list.

        Args:
            start: The first row.
            end: The row after the last one. The default is the end of the trace.
        """
        rows = slice(start, end)
        return type(self)(
            self.norms[rows],
            self.names,
            self.known[rows],
            {name: values[rows] for name, values in self.logged.items()},
            self.stride,
            self.steps[rows],
        )

    def write(self, path: str | PathLike[str], digits: int = 9) -> None:
        """Write the trace to a CSV file that `read` can read.

        Args:
            path: The file. If the file name ends in ".gz", the file is compressed.
            digits: The number of significant digits of each value.
        """
        header = ["step", *(f"norm/{name}" for name in self.names), *self.logged]
        columns = [*self.norms.unbind(1), *self.logged.values()]
        known = [*self.known.unbind(1), *(~x.isnan() for x in self.logged.values())]
        with _open(path) as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(header)
            for i in range(len(self)):
                pairs = zip(columns, known, strict=True)
                cells = [
                    f"{x[i].item():.{digits}g}" if is_known[i] else "" for x, is_known in pairs
                ]
                lines.writerow([int(self.steps[i]), *cells])


def stride_of(steps: Tensor | None, counts: Tensor | None) -> int:
    """Return how many steps each row stands for.

    Args:
        steps: The step numbers, if they are known. Without `counts`, their median difference is
            used, because a log may begin with an extra row for the first step.
        counts: The column `ROW` that a `Recorder` wrote, or None.
    """
    if counts is not None and len(counts) and counts.isfinite().all():
        return max(1, int(counts.amax().clamp(max=MOST_STEPS)))
    return 1 if steps is None or len(steps) < 2 else max(1, int(steps.diff().median()))


def norm_of_all(norms: Tensor) -> Tensor:
    """Return the norm of each row, even if float64 cannot represent the square of an element.

    Each row is first divided by a power of two. This division is exact.
    """
    largest = norms.amax(1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    scale = scale.where((largest > 0) & largest.isfinite(), 1.0)
    return torch.linalg.vector_norm(norms / scale, dim=1) * scale[:, 0]


def _open(path: str | PathLike[str]) -> io.TextIOWrapper:
    """Open a text file for writing. A ".gz" file has no time stamp, so equal runs look the same."""
    path = Path(path)
    if path.suffix != ".gz":
        return open(path, "w", newline="", encoding="utf-8")
    binary = gzip.GzipFile(path, "wb", mtime=0)
    return io.TextIOWrapper(binary, newline="", encoding="utf-8")
