"""Engine: the interface between the rules of a chain and the code that does their arithmetic.

An engine works with tensors and lists of tensors. It receives no buckets, links or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.formats import Nearest, Stochastic
from torchzero_clip.core.names import UnknownKey
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.tensorlist import Operand, TensorList

State: TypeAlias = dict[str, TensorList]
"""The state that `update` receives: one TensorList for each name that `init` returns."""
Group: TypeAlias = dict[str, Any]
"""The live hyperparameters by name, and the TensorLists "params" and "grads"."""


@dataclass(frozen=True)
class FusedKernel:
    """One of torch's fused optimizers: a kernel that computes the update and subtracts it.

    Args:
        function: The function of torch, or None if this version of torch has none. Its arguments
            are the parameters, the updates, the lists of `state`, `lr` and `weight_decay`. After a
            guard, the function also receives `found_inf`. If `found_inf` is 1, the function changes
            nothing.
        state: The names of the lists that the function accepts, in the order of its arguments. For
            a missing list, the function receives an empty list.
        advance: A function that counts the step. It is called with the state before `function`
            runs.
        decays: Whether `weight_decay` first shrinks the parameters by lr · weight_decay.
        devices: The device types for which torch has the function.
        numbers: The names of the lists that have one number per parameter. The other lists have
            tensors like the parameters.
    """

    function: Callable[..., Any] | None
    state: tuple[str, ...]
    advance: Callable[[State], Any]
    decays: bool = True
    devices: tuple[str, ...] = ("cpu", "cuda")
    numbers: tuple[str, ...] = ("step",)


class Ending(NamedTuple):
    """The tail of a chain for one bucket: w ← w - (rate · update + decay · w).

    Args:
        kernel: The fused optimizer of torch that computes the update. None if the list that reaches
            the tail is already the update.
        state: The stored state of the fused link, by name.
        forms: The formats of state that is stored in bfloat16.
        rate: The factor of the update: a number, or a 0-dim tensor on the parameters' device.
        decay: The factor of the parameters, a number.
        ratio: A tensor with one element, or None. The list is first divided by this element.
        writes_grads: Whether the list contains the gradients. The quotient is then written to the
            gradients.
    """

    kernel: FusedKernel | None
    state: dict[str, list[Tensor]]
    forms: dict[str, Stochastic]
    rate: Any
    decay: float
    ratio: Tensor | None
    writes_grads: bool


class Rule(Protocol):
    """The attributes and methods of a transform that an engine uses."""

    @property
    def reach(self) -> str:
        """The largest set of parameters that `update` processes together.

        With "tensor", the result for a tensor does not depend on the other tensors.
        """

    @property
    def per_entry(self) -> bool:
        """Whether `update` is elementwise."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        """Return the new update of one bucket."""


Formula: TypeAlias = "Callable[[TensorList, State, Group], TensorList]"
"""A function of the update, the state and the group, such as `update` of a rule."""


class Wrapped:
    """A rule around another rule. The outer rule receives all tensors at once."""

    reach = "model"
    per_entry = False


class Session(Protocol):
    """A session: the tensors of one bucket during one step.

    An engine may compute the lists of a session later in the step.
    """

    params: TensorList
    grads: TensorList
    skip: Skip
    """The flag of the step. If a guard sets the flag, later links change no tensors."""

    def adopt(self, u: TensorList) -> TensorList:
        """Attach a list to this session and return it. A borrowed list may move to a workspace."""

    def state(
        self, name: str, tensors: Sequence[Tensor], form: Stochastic | None = None
    ) -> TensorList:
        """Return state as a list that is written in place.

        With a format, the state is stored in bfloat16, and the list is in float32. Until `settle`,
        each call for the same name returns the same list.
        """

    def keep(self, form: Nearest) -> None:
        """Store the parameters in a format. Links read float32 if the format is wide."""

    def settle(self, path: str) -> None:
        """Round and store the state of the link at this path."""

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        """Return the rule's update of u. The update is computed now, or when it is first read."""

    def view(self, formula: Formula, u: TensorList, state: State, group: Group) -> TensorList:
        """Return the result of an elementwise formula that writes nothing.

        The result is computed now, or when it is first read.
        """

    def divide(
        self,
        u: TensorList,
        ratio: Tensor,
        operand: Callable[..., Operand] = lambda x, dtype=None: x,
        number: bool = False,
    ) -> TensorList:
        """Return the list divided by the ratios of a norm rule.

        Args:
            u: The list. If all ratios are known to be 1, this list itself is returned.
            ratio: A vector with one ratio per unit.
            operand: A function that converts a vector such as `ratio` to an operand. Its second
                argument is the dtype of the operand.
            number: Whether the ratio has one element, which divides all tensors.
        """

    def writable_grads(self) -> TensorList:
        """Return the gradients to write, after all pending lists that read them are computed."""

    def write_grads(self, u: TensorList, flowing: TensorList) -> TensorList:
        """Copy a list into the memory of the gradients, unless the list is already stored there.

        Returns:
            The update of the bucket from now on: `flowing`, or the new gradients if `flowing`
            borrows them.
        """

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> Session:
        """Return a session of the tensors at some indices."""

    def branch(self) -> Session:
        """Return a session of the same tensors for a second update. It has no workspace."""

    def finish(self, u: TensorList, ending: Ending) -> bool:
        """Run the tail of a chain in one pass over memory.

        Returns:
            Whether one pass was possible. If not, nothing was written. Every link of the tail must
            then run, and `subtract` ends the step.
        """

    def subtract(self, u: TensorList) -> None:
        """Compute w ← w - u, now or later in the step."""

    def close(self) -> None:
        """Finish the step. Changes of state happen even if their update was dropped."""


Records: TypeAlias = dict[str, Any]
"""The measurements of the links in a step, by path."""
Through: TypeAlias = "Callable[[Any], Records]"
"""A function that sends the gradients of a Step through the links."""
Cover: TypeAlias = "Callable[[list[Tensor], list[Tensor]], AbstractContextManager[Any]]"
"""A function that returns a context for one pass over memory.

Its first argument is the list of tensors that the pass reads. Its second argument is the list of
tensors that the pass writes.
"""


class Engine(Protocol):
    """An engine does the arithmetic of a step, now or later.

    The results of two engines differ only by rounding.
    """

    fuses: bool
    """Whether sessions run the tail of a chain in one pass: see `Session.finish`."""

    def __repr__(self) -> str:
        """Return the name, with the options that differ from the defaults."""

    def check(self, device: torch.device) -> None:
        """Raise an error if the engine cannot run on this device."""

    def twin(self, watch: Cover | None = None) -> Engine:
        """Return an equal engine with separate memory that compiles nothing, for `explain()`.

        Args:
            watch: A function that is called for each pass over memory.
        """

    def lasting(self) -> list[Tensor]:
        """Return the tensors that the engine keeps between steps, other than optimizer state."""

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Session:
        """Open a session for tensors that have this key and these places in every step."""

    def in_turn(self) -> Engine:
        """Return an engine for gradients that share memory. This engine writes immediately."""

    def step(self, step: Any, through: Through) -> Records:
        """Run a Step: call `through`, or replay an earlier step that is like this step."""

    def forget(self, why: str) -> None:
        """Run the next steps as a new engine would, because a resumed run has a new engine.

        Args:
            why: The name of the call that made this necessary. `says` reports the name.
        """

    def phase(self) -> Callable[[], None]:
        """Return a function for rollbacks.

        After a rollback has called the function, steps run like the steps after this call of
        `phase`.
        """

    def capture(self, devices: set[torch.device]) -> None:
        """Capture later steps on these devices. Raise ValueError if no step can be captured."""

    def says(self, besides: Sequence[str]) -> list[str]:
        """Return lines for `explain()` about replayed steps.

        The lines describe how steps are replayed. If steps are not replayed, the lines give the
        reason and what you can do.

        Args:
            besides: Reasons against a replay that do not come from a link.
        """


def updated(rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
    """Return the result of `update`, and store the lists that it assigned to its state dict.

    If the result is one of the state lists, return a borrowed list, so that later links do not
    change the state.
    """
    before = dict(state)
    result = rule.update(u, state, group)
    if not isinstance(result, TensorList):
        raise TypeError(
            f"{type(rule).__name__}.update must return a TensorList, got {type(result).__name__}"
        )
    for name, values in state.items():
        if name not in before:
            raise UnknownKey(
                f"{type(rule).__name__}.update must not add state[{name!r}], because init "
                f"returns only the keys {list(before)}"
            )
        if values is not before[name]:
            before[name].copy_(values)
    is_state = any([result is stored for stored in before.values()])
    return result.borrow() if is_state else result
