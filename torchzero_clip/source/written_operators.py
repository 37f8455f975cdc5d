"""Replacements for functions of the core that read tensors. They record lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import Kind, SourceError, Value, operand


def _statistics(recorder: OpRecorder, tensors: Sequence[Tensor], m: norms.Measure) -> Any:
    """Record the sum of each tensor, the only statistic that a rule may compute itself."""
    value = recorder.knows(tensors[0])
    if value is None or m.kind != "sum":
        raise SourceError(f"the transform calls norms.statistics with the order {m.kind}")
    write = lambda n: f"torch.stack([x.sum(dtype=torch.float64) for x in {n(value)}])"
    ones = torch.ones(1, dtype=torch.float64)
    return _Sums([recorder.record("tensor", ones, write, [value], "sums")])


def _percentile(recorder: OpRecorder, tensors: Sequence[Tensor], p: Any) -> Tensor:
    """Record a percentile of absolute values, either per tensor or over all groups together."""
    value = recorder.knows(tensors[0])
    assert value is not None
    live = recorder.knows(p)
    helper = recorder.helpers.percentile()

    def percentile_of(x: Value, kind: Kind) -> Tensor:
        args = [x] if live is None else [x, live]
        write = lambda n: f"{helper}({n(x)}, {operand(p if live is None else live, n)})"
        return recorder.record(kind, torch.full((), 0.1), write, args, each=kind == "list")

    if not recorder.joins:
        return percentile_of(value, "list")
    over = recorder.gathered(value)
    write = lambda n: f"torch.cat([x.flatten() for x in {n(over)}])"
    every = recorder.new("tensor", write, [over], "every", joint=True)
    return percentile_of(every, "tensor")


def _eps(recorder: OpRecorder, *_: Any) -> Any:
    """Record the machine epsilon of the update's dtype."""
    dtype = recorder.dtype()
    write = lambda n: f"torch.finfo({n(dtype)}).eps"
    return recorder.live.number(2.0**-23, Value("number"), write, (dtype,))


def _never_readable(*_: Any) -> bool:
    """Return False, because a file must not depend on the values of tensors."""
    return False


OPERATORS: dict[Any, Callable[..., Any]] = {
    norms.statistics: _statistics,
    norms.percentile: _percentile,
    norms.eps_of: _eps,
    norms.readable: _never_readable,
}
"""For each replaced function, its replacement."""


class NoNames(list[Any]):
    """A list of parameter names that raises an error if a rule reads it."""

    def _refuse(self, *_: Any) -> Any:
        """Raise the error for a rule that reads the names of parameters in a step."""
        raise SourceError("the transform uses the names of parameters in each step")

    __getitem__ = __iter__ = _refuse


class NoCounts(dict[str, Any]):
    """The scalars that a group stores. A file supports only the scalars of `init_group`."""

    def get(self, key: Any, *_: Any) -> Any:
        """Return a scalar of the group, or raise an error for a scalar of the whole model."""
        return dict.__getitem__(self, key) if key in self else self._refuse()

    def _refuse(self, *_: Any) -> Any:
        """Raise the error for a rule that stores scalars of the whole model."""
        raise SourceError("the transform stores a scalar for the whole model, such as a step count")

    __getitem__ = __setitem__ = setdefault = _refuse


class _Sums(list[Tensor]):
    """A table of statistics with one row."""

    def to(self, *_: Any) -> _Sums:
        """Return the same table, because dtype and device do not matter in a recording."""
        return self
