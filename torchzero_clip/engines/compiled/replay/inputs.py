"""Inputs of a step that is done again: its live values, and what stands for each leaf."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.step import UNHEARD, Groups, Notes, Step, counted
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.pointer_tables import TABLES
from torchzero_clip.engines.compiled.replay.step_recorder import Refused, StepRecorder

FIXED = (int, bool, float, str, type(None))


class StepInputs:
    """The leaves of a graph: tensors that stay, and those that are others in every step.

    Args:
        leaves: The tensors and functions that the graph was recorded with.
        changing: The gradients, and the loss if it is a tensor.
        live: The live values as tensors; on a device as the entries of a vector.
        numbers: The same as numbers.
        counts: How many gradients there are in each buffer.
        gradients: The buffers of gradients that launches look up, by the places of these.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        changing: Sequence[Tensor],
        live: Sequence[Tensor],
        numbers: Sequence[float],
        counts: Sequence[int],
        gradients: dict[tuple[int, ...], Buffer],
        vector: Tensor | None = None,
    ) -> None:
        self._vector = vector
        which = {id(t): i for i, t in enumerate(changing)}
        self._changing = {i: which[id(t)] for i, t in enumerate(leaves) if id(t) in which}
        self._leaves = [None if i in self._changing else t for i, t in enumerate(leaves)]
        self._live, self._numbers = live, list(numbers)
        ends = itertools.pairwise(itertools.accumulate(counts, initial=0))
        whole = {tuple(range(*some)): i for i, some in enumerate(ends)}
        self._keys, self._gradients = [(key, whole.get(key)) for key in gradients], gradients

    def enter(
        self, grads: Sequence[Buffer], numbers: Sequence[float], loss: Tensor | float | None
    ) -> list[Tensor]:
        """Take the gradients, live values and loss of a step; returns what changes."""
        if numbers != self._numbers:
            if self._vector is not None:
                TABLES.send(numbers, self._vector)
            else:
                for t, old, new in zip(self._live, self._numbers, numbers, strict=True):
                    if old != new:
                        t.fill_(new)
            self._numbers = list(numbers)
        flat = [t for buffer in grads for t in buffer.tensors]
        for key, i in self._keys:
            self._gradients[key] = Buffer([flat[k] for k in key]) if i is None else grads[i]
        return [*flat, loss] if isinstance(loss, Tensor) else flat

    def leaves(self, changing: Sequence[Tensor]) -> list[Any]:
        """All leaves of a step."""
        given = list(self._leaves)
        for i, k in self._changing.items():
            given[i] = changing[k]
        return given

    def leave(self) -> None:
        """Let go of the gradients."""
        self._gradients.clear()


class Later(Exception):
    """Raised where this step alone could not be done again; nothing has happened yet."""


class Counted(int):
    """A count of steps, and the key that it has in groups."""

    key: str
    by: int


class StepNotes(Notes):
    """What a step that is written down told: what was asked on the host, and what it counts.

    Args:
        recorder: What writes it down.

    Attributes:
        counts: The counts of steps that it keeps in groups.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self.counts, self._recorder = list[Counted](), recorder
        self._asked: list[tuple[Callable[..., Any], Any, Any]] = []
        self._numbers: list[tuple[Tensor, Callable[..., Any], Any]] = []
        self._values: list[Any] = []

    def made(self, why: str) -> None:
        raise Later(why)

    def host(self, why: str) -> None:
        raise Refused(why)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        self._asked.append((function, args, function(*args)))
        return self._asked[-1][-1]

    def number(self, device: torch.device, function: Callable[..., float], *args: Any) -> Tensor:
        value = function(*args)
        (made,) = self._recorder.memory(
            lambda: [torch.full((), value, dtype=wide(device), device=device)]
        )
        self._numbers.append((made, function, args))
        self._values.append(value)
        return made

    def count(self, groups: Sequence[Mapping[str, Any]], key: str, by: int) -> Counted:
        found = Counted(counted(groups, key, by))
        found.key, found.by = key, by
        self.counts.append(found)
        return found

    def same(self, groups: Groups, counted: bool) -> bool:
        """Whether the answers are as they were: those about counts, or the others."""
        some = [x for x in self._asked if any([isinstance(y, Counted) for y in x[1]]) == counted]
        return all([function(*_now(args, groups)) == answer for function, args, answer in some])

    def close(self) -> None:
        """Let go of what wrote the step down, which holds its gradients."""
        del self._recorder

    def count_on(self, groups: Groups) -> None:
        """Count a step that is done again."""
        values = [function(*_now(args, groups)) for _, function, args in self._numbers]
        for i, (t, _, _) in enumerate(self._numbers):
            if values[i] != self._values[i]:
                t.fill_(values[i])
        self._values = values
        for count in self.counts:
            UNHEARD.count(groups, count.key, count.by)


def _now(args: Any, groups: Groups) -> list[Any]:
    """The arguments with the counts of the next step."""
    return [counted(groups, x.key, x.by) if isinstance(x, Counted) else x for x in args]


class LiveValues:
    """The live values of a step, and behind them its loss; None where that is a tensor.

    Attributes:
        numbers: Those that may change from step to step.
        kinds: What must stay as it is for a replay; None where there are tensors and the like.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self.numbers: list[float] = []
        self.kinds: list[Any] | None = []
        for value in values:
            each = value if type(value) is tuple else (value,)
            if _numeric(value):
                self.numbers += each
                self.kinds.append((type(value), len(each)))
            elif all([type(x) in FIXED for x in each]):
                self.kinds.append((type(value), repr(value)))
            else:
                self.kinds = None
                break

    def odd(self, names: Sequence[str]) -> str:
        """The sentence about a value that has no kind."""
        i = next(i for i, x in enumerate(self._values) if LiveValues([x]).kinds is None)
        return f"{names[i % len(names)]!r} is a {type(self._values[i]).__name__}: give a number"

    def same(self, values: Sequence[Any]) -> bool:
        """Whether these are the same objects."""
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))

    def tensors(self, like: Tensor | None = None) -> list[Tensor]:
        """The numbers as tensors, so that no link can branch on one; on the device of `like`."""
        if like is not None:
            return list(TABLES.numbers(self.numbers, like).unbind())
        return [torch.tensor(x, dtype=torch.float64, device="cpu") for x in self.numbers]

    def vector(self, like: Tensor) -> Tensor:
        """The numbers as a vector on the device of a tensor, to be written in later steps."""
        return TABLES.numbers(self.numbers, like).clone()

    def given(self, step: Step, tensors: Sequence[Tensor]) -> tuple[list[dict[str, Any]], Any]:
        """The groups and the loss with these tensors instead of the numbers."""
        each, (names, values) = iter(tensors), step.live
        groups = [
            {**group, **{key: _taken(x, each) for key, x in zip(names, row, strict=True)}}
            for group, row in zip(step.groups, values, strict=True)
        ]
        return groups, _taken(step.loss, each)


def _taken(value: Any, tensors: Iterator[Tensor]) -> Any:
    if not _numeric(value):
        return value
    return tuple([next(tensors) for _ in value]) if type(value) is tuple else next(tensors)


def _numeric(value: Any) -> bool:
    """Whether a live value is a float, or a tuple of them."""
    return type(value) is float or (
        type(value) is tuple and bool(value) and all([type(x) is float for x in value])
    )
