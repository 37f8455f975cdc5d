"""Trace: the gradient norms of a run, as a file keeps them."""

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

from torchzero_clip.floats import GUARD
from torchzero_clip.study.logs import Log, norms_of, read
from torchzero_clip.study.recorder import Recorder
from torchzero_clip.study.table import ROW

MOST_STEPS = 2**53  # up to here a float counts one by one


class Trace:
    """Gradient norms of a run, steps by units, and what was logged beside them.

    A file is what `Recorder.to_csv` writes, perhaps with ".gz" at the end of its name: a column
    "step", a column "norm" or "Rule/norm" or, for many units, "norm/<unit>" each, and others. Of
    merged rows "stands_for" says how many steps each has; without it, as in logs of others, which
    are read as well (see `read`), that is how far the first two are apart.

    Args:
        norms: Steps by units.
        names: What the units are: names of parameters, for rules with dim="layer".
        known: False where a unit had no gradient; all True unless it is given.
        logged: Other numbers by name, one a step; NaN where there was none. "spike" is 1 where a
            gradient is known to be bad.
        stride: How many steps a row stands for.
        steps: The number of each step, or of the last of a row; counted from 1 unless given.

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
                f"Trace: norms must be steps by units, got shape {tuple(norms.shape)}; give one "
                "norm a step as norms[:, None]"
            )
        self.norms = norms.detach().cpu().to(torch.float64)
        self.names = [str(i) for i in range(norms.shape[1])] if names is None else list(names)
        if len(self.names) != norms.shape[1]:
            raise ValueError(f"Trace: got {len(self.names)} names for {norms.shape[1]} units")
        self.known = torch.ones_like(self.norms, dtype=torch.bool) if known is None else known
        self.logged = {name: x.detach().cpu().double() for name, x in (logged or {}).items()}
        self.stride = stride
        counted = torch.arange(1, len(norms) + 1) * stride
        self.steps = counted if steps is None else steps.detach().cpu().long()

    def __len__(self) -> int:
        return len(self.norms)

    def __repr__(self) -> str:
        return f"Trace({len(self)} steps, {len(self.names)} units)"

    @property
    def total(self) -> Tensor:
        """The norm of everything, a number a step."""
        return norm_of_all(self.norms.where(self.known, 0.0))

    @property
    def median(self) -> float:
        """The median of all norms of everything that are finite; NaN if there is none."""
        total = self.total
        return total.where(total.isfinite(), math.nan).nanmedian().item()

    @property
    def spikes(self) -> Tensor | None:
        """Where gradients are known to be bad, if "spike" was logged."""
        return self.logged["spike"] > 0 if "spike" in self.logged else None

    @classmethod
    def of(cls, recorder: Recorder, name: str | None = None) -> Self:
        """What a recorder has seen: the norms of the first rule, or those with this name."""
        history = {
            key: torch.tensor(x, dtype=torch.float64) for key, x in recorder.history().items()
        }
        columns: dict[str, Tensor] = {}
        for key, values in history.items():
            if values.dim() == 1:
                columns[key] = values
            else:
                rows = zip(recorder.units(key), values.unbind(1), strict=True)
                columns |= {f"{key}/{unit}": column for unit, column in rows}
        known = {key: ~column.isnan() for key, column in columns.items()}
        first = [*norms_of(columns), "norm"][0]
        return cls._from_columns(columns, known, first if name is None else name)

    @classmethod
    def read(cls, path: str | PathLike[str], name: str | None = None) -> Self:
        """The trace in a file: the norms of its first rule, or those with this name.

        Besides the files of a Recorder it takes those of others with a column such as grad_norm:
        CSV, also as TensorBoard and Weights & Biases export it, JSON lines, and the
        trainer_state.json of a Hugging Face Trainer.

        A last line that has no newline is read where it has all its cells; else, as a killed
        writer leaves it, it is left out. A warning says which.
        """
        return cls.from_log(read(Path(path)), name)

    @classmethod
    def from_log(cls, log: Log, name: str | None = None) -> Self:
        """The trace in a log that was read."""
        name = log.choose(name)
        return cls._from_columns(*log.columns(name), name)

    @classmethod
    def _from_columns(
        cls, columns: Mapping[str, Tensor], known: Mapping[str, Tensor], name: str
    ) -> Self:
        units = [key for key in columns if key == name or key.startswith(f"{name}/")]
        if not units:
            raise ValueError(
                f"Trace: there is no column {name!r}; there are {list(columns)}: a norm is "
                'recorded where a rule measures it, as ClipNorm(math.inf, name="raw") in front does'
            )
        steps = columns.get("step")
        if steps is not None and not (steps.abs() <= MOST_STEPS).all():
            steps = None  # NaN, or numbers that count nothing
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
        """The rows from one to another, as those of a list."""
        rows = slice(start, end)
        logged = {name: values[rows] for name, values in self.logged.items()}
        known = self.known[rows]
        norms, steps = self.norms[rows], self.steps[rows]
        return type(self)(norms, self.names, known, logged, self.stride, steps)

    def write(self, path: str | PathLike[str], digits: int = 9) -> None:
        """Write the trace to a file, which `read` reads; ".gz" in its name compresses it."""
        header = ["step", *(f"norm/{name}" for name in self.names), *self.logged]
        columns = [*self.norms.unbind(1), *self.logged.values()]
        known = [*self.known.unbind(1), *(~x.isnan() for x in self.logged.values())]
        with _open(path) as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(header)
            for i in range(len(self)):
                pairs = zip(columns, known, strict=True)
                cells = [f"{x[i].item():.{digits}g}" if there[i] else "" for x, there in pairs]
                lines.writerow([int(self.steps[i]), *cells])


def stride_of(steps: Tensor | None, counts: Tensor | None) -> int:
    """How many steps a row stands for: as a Recorder wrote, or as far as two rows are apart."""
    if counts is not None and len(counts) and counts.isfinite().all():
        return max(1, int(counts.amax().clamp(max=MOST_STEPS)))
    return 1 if steps is None or len(steps) < 2 else max(1, int(steps[1] - steps[0]))


def norm_of_all(norms: Tensor) -> Tensor:
    """The norm of each row, also where a square of an entry is too large or small for a float."""
    largest = norms.amax(1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    scale = scale.where((largest > 0) & largest.isfinite(), 1.0)
    return torch.linalg.vector_norm(norms / scale, dim=1) * scale[:, 0]


def _open(path: str | PathLike[str]) -> io.TextIOWrapper:
    """A text file to write; one whose name ends in .gz has no time in it: equal runs are equal."""
    path = Path(path)
    if path.suffix != ".gz":
        return open(path, "w", newline="", encoding="utf-8")
    binary = gzip.GzipFile(path, "wb", mtime=0)
    return io.TextIOWrapper(binary, newline="", encoding="utf-8")
