"""Trace: the gradient norms of a run, as a file keeps them."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import Self

from torchzero_clip.floats import GUARD
from torchzero_clip.recorder import Recorder


class Trace:
    """Gradient norms of a run, steps by units, and what was logged beside them.

    A file is what `Recorder.to_csv` writes, perhaps with ".gz" at the end of its name: a column
    "step", a column "norm" or "Rule/norm" or, for many units, "norm/<unit>" each, and others.

    Args:
        norms: Steps by units.
        names: What the units are: names of parameters, for rules with dim="layer".
        known: False where a unit had no gradient; all True unless it is given.
        logged: Other numbers by name, one a step; NaN where there was none. "spike" is 1 where a
            gradient is known to be bad.
        stride: How many steps a row stands for.

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

    def __len__(self) -> int:
        return len(self.norms)

    def __repr__(self) -> str:
        return f"Trace({len(self)} steps, {len(self.names)} units)"

    @property
    def total(self) -> Tensor:
        """The norm of everything, a number a step."""
        return torch.linalg.vector_norm(self.norms.where(self.known, 0.0), dim=1)

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
        return cls._from_columns(columns, known, name)

    @classmethod
    def read(cls, path: str | PathLike[str], name: str | None = None) -> Self:
        """The trace in a file: the norms of its first rule, or those with this name.

        A last line that has no end, as a killed writer leaves it, is left out, with a warning.
        """
        header, *rows = _rows(path) or [[]]
        if not rows:
            raise ValueError(f"Trace: {path} has no steps")
        cells = dict(zip(header, zip(*rows, strict=True), strict=True))
        try:
            columns = {
                key: torch.tensor([float(x or math.nan) for x in column], dtype=torch.float64)
                for key, column in cells.items()
            }
        except ValueError as error:
            raise ValueError(f"Trace: {path} must have numbers in its cells: {error}") from None
        known = {key: torch.tensor([x != "" for x in column]) for key, column in cells.items()}
        return cls._from_columns(columns, known, name)

    @classmethod
    def _from_columns(
        cls, columns: Mapping[str, Tensor], known: Mapping[str, Tensor], name: str | None
    ) -> Self:
        if name is None:
            name = next((prefix for key in columns if (prefix := norm_of(key))), "norm")
        units = [key for key in columns if key == name or key.startswith(f"{name}/")]
        if not units:
            raise ValueError(
                f"Trace: there is no column {name!r}; there are {list(columns)}: a norm is "
                'recorded where a rule measures it, as ClipNorm(math.inf, name="raw") in front does'
            )
        steps = columns["step"].tolist() if "step" in columns else [1.0, 2.0]
        measured = {"norm", "limit", "factor", "clipped", *GUARD}
        return cls(
            torch.stack([columns[key] for key in units], 1),
            [key[len(name) + 1 :] or "0" for key in units],
            torch.stack([known[key] for key in units], 1),
            {
                key: values
                for key, values in columns.items()
                if key not in (*units, "step") and not set(key.split("/")) & measured
            },
            int(steps[1] - steps[0]) if len(steps) > 1 else 1,
        )

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
                lines.writerow([(i + 1) * self.stride, *cells])


def norm_of(column: str) -> str | None:
    """The name of the norms that a column is part of: "ZClip/norm" of "ZClip/norm/3"."""
    parts = column.split("/")
    return "/".join(parts[: parts.index("norm") + 1]) if "norm" in parts else None


def _rows(path: str | PathLike[str]) -> list[list[str]]:
    """The cells of every whole line of a file; those of the first are its header."""
    text = _read(Path(path))
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        warnings.warn(f"Trace: {path} ends within a line, which is left out", stacklevel=3)
    lines = csv.reader(io.StringIO(whole.decode(), newline=""), strict=True)
    rows: list[list[str]] = []
    line = 1
    try:
        for row in lines:
            rows += [row] if row else []  # a line may be empty
            if row and len(row) != len(rows[0]):
                raise ValueError(
                    f"Trace: {path} must have {len(rows[0])} cells in every line, as many as its "
                    f"header, got {len(row)} in line {line}"
                )
            line = lines.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"Trace: {path} must close every quote that it opens, got line {line}: {error}"
        ) from None
    return rows


def _read(path: Path) -> bytes:
    """What is in a file, as far as it was written."""
    if path.suffix != ".gz":
        return path.read_bytes()
    parts = [b""]
    with gzip.open(path) as file, contextlib.suppress(EOFError):  # its end was never written
        while part := file.read1():
            parts.append(part)
    return b"".join(parts)


def _open(path: str | PathLike[str]) -> io.TextIOWrapper:
    """A text file to write; one whose name ends in .gz has no time in it: equal runs are equal."""
    path = Path(path)
    if path.suffix != ".gz":
        return open(path, "w", newline="", encoding="utf-8")
    binary = gzip.GzipFile(path, "wb", mtime=0)
    return io.TextIOWrapper(binary, newline="", encoding="utf-8")
