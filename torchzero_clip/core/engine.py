"""Engine: the interface between what a chain says and how its arithmetic is done.

It knows tensors and lists, never buckets, links or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.formats import Nearest, Stochastic
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.tensorlist import Operand, TensorList

State: TypeAlias = dict[str, TensorList]
"""The state that `update` gets: for each name that `init` makes, a tensor for each parameter."""
Group: TypeAlias = dict[str, Any]
"""The live values by name, and the TensorLists "params" and "grads"."""


@dataclass(frozen=True)
class FusedKernel:
    """One of torch's fused optimizers: a kernel that computes the update and subtracts it.

    Args:
        function: Called with the parameters, the updates, the lists of `state`, `lr`,
            `weight_decay`, and behind a guard `found_inf`: it changes nothing where that is 1. None
            where this torch has it no more.
        state: The names of the lists that it takes, in its order; one that is missing is empty.
        advance: Called with the state before it runs, to count the step.
        decays: Whether its `weight_decay` shrinks the parameters by lr · weight_decay first.
        devices: The devices that torch has it for.
        numbers: The names of the lists that have one number a parameter; others are like these.
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
        kernel: The fused optimizer of torch that computes the update from what flows. None if what
            flows is the update.
        state: The state of the fused link, by name, as it is stored.
        forms: The formats of state that is stored in bfloat16.
        rate: A number, or a 0-dim tensor on the device of the parameters.
        decay: A number.
        ratio: What flows is divided by it first: a tensor with one element, or None.
        writes_grads: Whether what flows are the gradients, and the quotient is written there.
    """

    kernel: FusedKernel | None
    state: dict[str, list[Tensor]]
    forms: dict[str, Stochastic]
    rate: Any
    decay: float
    ratio: Tensor | None
    writes_grads: bool


class Rule(Protocol):
    """All that an engine knows of a transform."""

    @property
    def reach(self) -> str:
        """How far `update` looks: "tensor" where that of some tensors is that of all, for these."""

    @property
    def per_entry(self) -> bool:
        """Whether `update` takes each entry by itself."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        """The transformed update of one bucket."""

    def fused(self, group: Group) -> FusedKernel | None:
        """The fused optimizer of torch that does `update` and the subtraction at once, if any."""

    def affine(self, group: Group) -> tuple[Any, Any] | None:
        """(a, b) where `update` is u ← a · u + b · w."""


Formula: TypeAlias = "Callable[[TensorList, State, Group], TensorList]"
"""What `update` is, of u, state and live values."""


class Wrapped:
    """A rule around another one, which no kernel does, and which sees all tensors at once."""

    reach, per_entry = "model", False

    def fused(self, group: Group) -> FusedKernel | None:
        return None

    def affine(self, group: Group) -> tuple[Any, Any] | None:
        return None


class Session(Protocol):
    """The tensors of one bucket during one step. Lists that it gives may be computed later."""

    params: TensorList
    grads: TensorList
    skip: Skip
    """The flag of the step: what is written once there is one stays as it was where it is set."""

    def adopt(self, u: TensorList) -> TensorList:
        """The same list as one of this session; a borrowed one gets a workspace to move to."""

    def state(
        self, name: str, tensors: Sequence[Tensor], form: Stochastic | None = None
    ) -> TensorList:
        """State as a list that is written in place.

        With a format it is kept in bfloat16: the list is in float32, and the same for a name
        until it is settled.
        """

    def keep(self, form: Nearest) -> None:
        """Keep the parameters in a format, which links see at once where it is a wide one."""

    def settle(self, path: str) -> None:
        """Round the state of the link at this path, once for all that was done to it."""

    def update(self, rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
        """The update that the rule makes of u, computed now or when it is first read."""

    def view(self, formula: Formula, u: TensorList, state: State, group: Group) -> TensorList:
        """What a formula makes of u that writes nothing, and takes each entry by itself: computed
        now, or piece by piece whenever it is read.
        """

    def divide(
        self,
        u: TensorList,
        ratio: Tensor,
        operand: Callable[..., Operand] = lambda x, dtype=None: x,
        number: bool = False,
    ) -> TensorList:
        """The list over the ratios of a norm rule; itself where all are known to be 1.

        `operand` makes one of a vector like `ratio`, in another dtype if one is given; a ratio of
        one entry may be a `number` for all.
        """

    def writable_grads(self) -> TensorList:
        """The gradients, to be written in place, once pending lists that read them are computed."""

    def write_grads(self, u: TensorList, flowing: TensorList) -> TensorList:
        """Put a list into the memory of the gradients, unless it lies there; returns what flows on:
        the list that did, or the gradients as they will be where it borrows them.
        """

    def select(self, where: Sequence[int], key: Hashable, places: Sequence[int]) -> Session:
        """A session of some of the tensors."""

    def branch(self) -> Session:
        """A session of the same tensors for a second update, which does not use this workspace."""

    def finish(self, u: TensorList, ending: Ending) -> bool:
        """Do the tail of a chain in one pass over memory.

        Returns:
            Whether that was possible. If not, nothing was written: every link of the tail must
            run, and `subtract` ends the step.
        """

    def subtract(self, u: TensorList) -> None:
        """w ← w - u, by the end of the step."""

    def close(self) -> None:
        """Finish the step; an update that was deferred and then dropped advances its state."""


Records: TypeAlias = dict[str, Any]
"""What the links measured in a step, by path."""
Through: TypeAlias = "Callable[[Any], Records]"
"""It sends the gradients of a Step through the links."""
Cover: TypeAlias = "Callable[[list[Tensor], list[Tensor]], AbstractContextManager[Any]]"
"""It surrounds a pass over memory as a whole; called with the tensors that are read and written."""


class Engine(Protocol):
    """The place where arithmetic is done, now or later; results depend on it by rounding alone."""

    fuses: bool
    """Whether its sessions run the tail of a chain in one pass: see `Session.finish`."""

    def __repr__(self) -> str:
        """Its name, with the options that are no defaults."""

    def check(self, device: torch.device) -> None:
        """Raise a sentence where the engine cannot run on this device."""

    def twin(self, watch: Cover | None = None) -> Engine:
        """An engine that does the same with memory of its own, for a look: nothing is compiled.

        `watch` surrounds what is one pass, whatever operators it is made of.
        """

    def lasting(self) -> list[Tensor]:
        """The tensors that it keeps from step to step; state is not its own."""

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Session:
        """A session for tensors that come under this key, at these places, in every step."""

    def in_turn(self) -> Engine:
        """The engine of a step whose gradients share memory: every write is seen by all."""

    def step(self, step: Any, through: Through) -> Records:
        """Do a Step: send it `through`, or do what an earlier one did that is like it."""

    def forget(self, why: str) -> None:
        """Do the next steps as an engine that has done none: one that goes on from here is such.

        `why` names what was called, for `says`.
        """

    def phase(self) -> Callable[[], None]:
        """What has later steps be done as those behind this call, which goes back in a run."""

    def capture(self, devices: set[torch.device]) -> None:
        """Have its steps on these devices captured; a ValueError where none can be."""

    def says(self, besides: Sequence[str]) -> list[str]:
        """Lines on how it does steps again, or why not and what to do about that.

        `besides` are reasons not to which are no link's.
        """


def updated(rule: Rule, u: TensorList, state: State, group: Group) -> TensorList:
    """The result of `update`; what it assigned to its state dict goes into the state.

    State that it returns is borrowed.
    """
    before = dict(state)
    out = rule.update(u, state, group)
    if not isinstance(out, TensorList):
        raise TypeError(
            f"{type(rule).__name__}.update must return a TensorList, got {type(out).__name__}"
        )
    for name, values in state.items():
        if name not in before:
            raise KeyError(
                f"{type(rule).__name__}.update set state[{name!r}], which init does not make; "
                f"init makes {list(before)}"
            )
        if values is not before[name]:
            before[name].copy_(values)
    return out.borrow() if any([out is held for held in before.values()]) else out
