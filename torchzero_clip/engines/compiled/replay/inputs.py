"""The inputs of a replay, which differ from step to step.

`Replays` uses three classes:

- `LiveValues` holds the hyperparameters and the loss of one step. It returns these values as
  numbers or as tensors.
- `StepNotes` stores the functions that a recorded step called on the host, and their results.
  Before each replay it calls the functions again and compares the results.
- `StepInputs` fills the inputs of a step graph. For each replay it writes the hyperparameters to
  their tensors and returns the gradients and the loss of the step.
"""

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
"""The types of values that a replay compares.

A hyperparameter of these types must be equal in every replay, unless it is a float or a tuple of
floats.
"""


class StepInputs:
    """The inputs of a step graph. Some are the same tensors in every step, and others are new.

    Args:
        leaves: The inputs of the graph during recording: tensors, and functions of this library.
        changing: The tensors that are new in every step: the gradients, and the loss if it is a
            tensor.
        live: The hyperparameters as tensors. The tensors are the same in every step, but their
            values change. On a GPU the tensors are elements of `vector`.
        numbers: The values of `live`.
        counts: The number of gradients in each buffer.
        gradients: The gradient buffers in which launches find their gradients. Each key is a tuple
            with the index of each gradient in the buffer.
        vector: The vector of all hyperparameters if they are on a GPU, otherwise None.
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
        which = {id(t): i for i, t in enumerate(changing)}
        self._changing = {i: which[id(t)] for i, t in enumerate(leaves) if id(t) in which}
        self._leaves = [None if i in self._changing else t for i, t in enumerate(leaves)]
        self._live = live
        self._numbers = list(numbers)
        self._vector = vector
        # for each key of `gradients` the buffer of a whole cohort that has these gradients, if any
        ends = itertools.pairwise(itertools.accumulate(counts, initial=0))
        cohorts = {tuple(range(*span)): i for i, span in enumerate(ends)}
        self._keys = [(key, cohorts.get(key)) for key in gradients]
        self._gradients = gradients

    def enter(
        self, grads: Sequence[Buffer], numbers: Sequence[float], loss: Tensor | float | None
    ) -> list[Tensor]:
        """Set the inputs of a step, and return the tensors that are new in every step.

        Args:
            grads: The gradients of the step, as one buffer for each cohort.
            numbers: The hyperparameters of the step, and the loss if the loss is a number.
            loss: The loss. If the loss is a tensor, it is returned after the gradients.
        """
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
        """Return all inputs of the graph. `changing` has the gradients and the loss of the step."""
        leaves = list(self._leaves)
        for i, k in self._changing.items():
            leaves[i] = changing[k]
        return leaves

    def leave(self) -> None:
        """Drop the references to gradients, so that the gradients can be freed after the step."""
        self._gradients.clear()


class Later(Exception):
    """Raised if this step cannot be recorded but a later step may be. Nothing has changed yet."""


class Counted(int):
    """A count of steps that is stored in the parameter groups.

    Attributes:
        key: The key under which a group stores the count.
        by: The number that each step adds to the count.
    """

    key: str
    by: int


class StepNotes(Notes):
    """The host functions that a recorded step called, and the step counts that a replay increases.

    The results of these functions are called answers. While a step is recorded, the step calls the
    methods of `Notes`. Before a replay, `answers_match` calls the same functions again and compares
    the answers. In a replay, `count_on` increases the counts and updates the tensors that depend on
    the counts.

    Args:
        recorder: The recorder of the step.

    Attributes:
        counts: The counts of steps that the recorded step increased. Groups store the counts.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self.counts = list[Counted]()
        self._recorder = recorder
        self._asked: list[tuple[Callable[..., Any], Any, Any]] = []  # function, arguments, answer
        self._numbers: list[tuple[Tensor, Callable[..., Any], Any]] = []
        self._values: list[Any] = []  # what is in the tensors of `_numbers` now

    def made(self, why: str) -> None:
        raise Later(why)

    def host(self, why: str) -> None:
        raise Refused(why)

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        answer = function(*args)
        self._asked.append((function, args, answer))
        return answer

    def number(self, device: torch.device, function: Callable[..., float], *args: Any) -> Tensor:
        value = function(*args)
        (tensor,) = self._recorder.memory(
            lambda: [torch.full((), value, dtype=wide(device), device=device)]
        )
        self._numbers.append((tensor, function, args))
        self._values.append(value)
        return tensor

    def count(self, groups: Sequence[Mapping[str, Any]], key: str, by: int) -> Counted:
        count = Counted(counted(groups, key, by))
        count.key = key
        count.by = by
        self.counts.append(count)
        return count

    def answers_match(self, groups: Groups, about_counts: bool) -> bool:
        """Return whether functions return the recorded answers for the next step.

        Args:
            groups: The parameter groups.
            about_counts: If True, call only the functions that receive a count of steps. If False,
                call only the other functions.
        """
        for function, args, answer in self._asked:
            is_about_counts = any([isinstance(x, Counted) for x in args])
            if is_about_counts == about_counts and function(*_next(args, groups)) != answer:
                return False
        return True

    def close(self) -> None:
        """Drop the recorder, so that the gradients of the recorded step can be freed."""
        del self._recorder

    def count_on(self, groups: Groups) -> None:
        """Increase the counts for a replayed step, and fill the tensors that depend on a count."""
        values = [function(*_next(args, groups)) for _, function, args in self._numbers]
        for (t, _, _), old, new in zip(self._numbers, self._values, values, strict=True):
            if new != old:
                t.fill_(new)
        self._values = values
        for count in self.counts:
            UNHEARD.count(groups, count.key, count.by)


def _next(args: Any, groups: Groups) -> list[Any]:
    """Return the arguments of a function, with each count replaced by its next value."""
    return [counted(groups, x.key, x.by) if isinstance(x, Counted) else x for x in args]


class LiveValues:
    """The hyperparameters and the loss of a step, as numbers.

    Args:
        values: The hyperparameters of all groups, followed by the loss. If the loss is a tensor,
            None takes its place.

    Attributes:
        numbers: The floats among the values. They may differ in every step.
        kinds: The types of all values, and the values that are not floats. A step is replayed only
            if the kinds are equal. None if a value cannot be compared, for example a tensor.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self.numbers: list[float] = []
        self.kinds: list[Any] | None = []
        for i, value in enumerate(values):
            items = value if type(value) is tuple else (value,)
            if _is_numeric(value):
                self.numbers += items
                self.kinds.append((type(value), len(items)))
            elif all([type(x) in FIXED for x in items]):
                self.kinds.append((type(value), repr(value)))
            else:
                self.kinds = None
                self._odd = i
                break

    def odd(self, names: Sequence[str]) -> str:
        """Return a message that names the first hyperparameter that cannot be compared."""
        name = names[self._odd % len(names)]
        kind = type(self._values[self._odd]).__name__
        return f"the hyperparameter {name!r} has the type {kind}: set it to a number"

    def same(self, values: Sequence[Any]) -> bool:
        """Return whether `values` are the same objects as the values in `self`."""
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))

    def tensors(self, like: Tensor | None = None) -> list[Tensor]:
        """Return the numbers as 0-dim tensors on the GPU of `like`. Without `like`, use the CPU."""
        if like is not None:
            return list(TABLES.numbers(self.numbers, like).unbind())
        return [torch.tensor(x, dtype=torch.float64, device="cpu") for x in self.numbers]

    def vector(self, like: Tensor) -> Tensor:
        """Return the numbers as a new vector on the device of `like`. Replays may write to it."""
        return TABLES.numbers(self.numbers, like).clone()

    def substituted(
        self, step: Step, tensors: Sequence[Tensor]
    ) -> tuple[list[dict[str, Any]], Any]:
        """Return the groups and the loss of a step, with tensors in place of the numbers.

        A number may have another value in a later step. Links receive tensors, so that no link can
        branch on such a number.
        """
        remaining = iter(tensors)
        names, values = step.live
        groups = [
            {**group, **{key: _replaced(x, remaining) for key, x in zip(names, row, strict=True)}}
            for group, row in zip(step.groups, values, strict=True)
        ]
        return groups, _replaced(step.loss, remaining)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the next tensor for a number, a tuple of tensors for a tuple, otherwise `value`."""
    if not _is_numeric(value):
        return value
    return tuple([next(tensors) for _ in value]) if type(value) is tuple else next(tensors)


def _is_numeric(value: Any) -> bool:
    """Return whether a value is a float or a tuple of floats."""
    return type(value) is float or (
        type(value) is tuple and bool(value) and all([type(x) is float for x in value])
    )
