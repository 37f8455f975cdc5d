"""Operators: what functions of the core that look at tensors are as lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import ATOM, SourceError, Value, operand


def _statistics(recorder: OpRecorder, tensors: Sequence[Tensor], m: norms.Measure) -> Any:
    value = recorder.knows(tensors[0])
    if value is None or m.kind != "sum":
        raise SourceError(f"it takes statistics of its own, {m.kind}")
    made = Value("tensor", hint="sums")
    write = lambda n: (f"torch.stack([x.sum(dtype=torch.float64) for x in {n(value)}])", ATOM)
    recorder.add(write, [value], made)
    return _Sums([recorder.learn(torch.ones(1, dtype=torch.float64), made)])


def _percentile(recorder: OpRecorder, tensors: Sequence[Tensor], p: Any) -> Tensor:
    value, q = recorder.knows(tensors[0]), recorder.knows(p)
    assert value is not None
    helper, asked = recorder.helpers.percentile(), [] if q is None else [q]

    def of(over: Value, kind: Any, **kinds: Any) -> Tensor:
        write = lambda n: (f"{helper}({n(over)}, {operand(p if q is None else q, n)[0]})", ATOM)
        recorder.add(write, [over, *asked], made := Value(kind), **kinds)
        return recorder.learn(torch.full((), 0.1), made)

    if not recorder.joins:
        return of(value, "list", each=True)
    over, every = recorder.gathered(value), Value("tensor", hint="every")
    write = lambda n: (f"torch.cat([x.flatten() for x in {n(over)}])", ATOM)
    recorder.add(write, [over], every, joint=True)
    return of(every, "tensor")


def _eps(recorder: OpRecorder, *_: Any) -> Any:
    kind = recorder.dtype()
    write = lambda n: (f"torch.finfo({n(kind)}).eps", ATOM)
    return recorder.live.number(2.0**-23, Value("number"), write, (kind,))


OPERATORS: dict[Any, Callable[..., Any]] = {
    norms.statistics: _statistics,
    norms.percentile: _percentile,
    norms.eps_of: _eps,
    norms.readable: lambda *_: False,  # a file is of no value
}


class NoNames(list[Any]):
    """The names of parameters, which a file has only where it chooses parameters."""

    def _refuse(self, *_: Any) -> Any:
        raise SourceError("it asks for the name of every parameter in every step")

    __getitem__ = __iter__ = _refuse


class NoCounts(dict[str, Any]):
    """What a group keeps besides live values: in a file the numbers of the group alone."""

    def get(self, key: Any, *_: Any) -> Any:
        return dict.__getitem__(self, key) if key in self else self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise SourceError("it counts steps, or keeps other numbers of the model")

    __getitem__ = __setitem__ = setdefault = _refuse


class _Sums(list[Tensor]):
    """Statistics with one row, as they are read."""

    def to(self, *_: Any) -> _Sums:
        return self
