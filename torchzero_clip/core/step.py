"""Step: the data that all buckets of one step share, and how a step begins and ends.

`Notes` are the reports of a step to an engine that may replay the step. A replayed step runs the
recorded operations of an earlier step again, without the Python code of the links.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.cohort import Cohort, Roster
from torchzero_clip.core.engine import Engine, Session
from torchzero_clip.core.gradients import USUAL, GradPlace, StepGradients
from torchzero_clip.core.link import Link
from torchzero_clip.core.plan import Tail
from torchzero_clip.core.sharding.collectives import gather
from torchzero_clip.core.sharding.layout import full
from torchzero_clip.core.sharding.ranks import rank_and_world
from torchzero_clip.core.skip import Skip, Skipped
from torchzero_clip.core.tensor_kinds import wide

Groups: TypeAlias = Sequence[dict[str, Any]]
Loss: TypeAlias = "Tensor | float | None"


class Notes:
    """Reports from the links of a step to an engine that may replay the step.

    This class is for steps that are never replayed. An engine that replays steps has a subclass.
    """

    def made(self, why: str) -> None:
        """Report that something is created or restarted in this step, but not in later steps."""

    def host(self, why: str) -> None:
        """Report that the host decides something in each step, so that no step can be replayed."""

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return function(*args). The step is only replayed if the result is the same."""
        return function(*args)

    def number(self, device: torch.device, function: Callable[..., float], *args: Any) -> Any:
        """Return function(*args).

        If the step is recorded, return a tensor instead. In each replayed step, the tensor receives
        the new result.
        """
        return function(*args)

    def count(self, groups: Sequence[Mapping[str, Any]], key: str, by: int) -> int:
        """Add `by` to a count of steps in every group, and return the new count."""
        count = counted(groups, key, by)
        for group in groups:
            group["chain"][key] = count
        return count


def counted(groups: Sequence[Mapping[str, Any]], key: str, by: int) -> int:
    """Return a count of steps plus `by`, without storing it."""
    return int(groups[0]["chain"].get(key, 0)) + by


UNHEARD = Notes()
"""The notes of steps that are never replayed."""


def one_number(loss: Any) -> Loss:
    """Return a loss as a float or a detached 0-dim tensor, or None if it is not one number.

    If the loss is a DTensor, the result is a plain tensor with the whole loss.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return full(loss.detach()).reshape(())
    try:
        return float(loss) if isinstance(loss, (int, float)) else None
    except OverflowError:
        return None


def evaluate(closure: Callable[[], Any]) -> Any:
    """Run a closure with gradients enabled, and return its loss."""
    if not callable(closure):
        raise TypeError(
            f"step: closure must be a function that returns the loss, or None, got {closure!r}"
        )
    with torch.enable_grad():
        return closure()


@dataclass(eq=False)
class Step:
    """One step of an optimizer: the data that all its buckets share.

    A step is a context manager. On exit, the step closes the sessions of its buckets. If a guard
    skips the step and the host reads the flag of the guard, the `with` block ends early.

    Args:
        groups: The parameter groups.
        states: The state of each parameter, such as `optimizer.state`.
        record: A dict for the measurements of the links, by path. `metrics()` reads it.
        engine: The engine that opens sessions.
        process_group: A process group if each of its ranks has another part of the model.
        roster: The roster, which keeps the cohorts of the groups from step to step.
        loss: The loss that was reported for this step.
        live: The keys of the live hyperparameters, and for each group the values in the order of
            the keys.
        rounding: How the updates of parameters in half precision are rounded. Empty for the
            rounding of torch.
        place: The place of the gradients.
        kind: Settings of the optimizer. A recorded step is only replayed if its settings are equal
            to these settings. If `kind` is None, the step is not replayed.
        drawn: The names of the counts that already include this step: see `draw`.
        tails: The tails of the chain, if the engine fuses.
        factors: The norm rules by whose ratio a tail divides.
        is_trial: Whether only this rank runs the step, without the other ranks, to inspect it.
        only_names: Whether links store NaN for `metrics()`, because they measure nothing.
    """

    groups: Groups
    states: Mapping[Tensor, dict[str, Any]] | None
    record: dict[str, Any]
    engine: Engine
    process_group: Any = None
    roster: Roster = field(default_factory=Roster)
    loss: Loss = None
    live: tuple[Iterable[str], Sequence[Sequence[Any]]] = ((), ())
    rounding: str = ""
    place: GradPlace = USUAL
    kind: Hashable = None
    drawn: tuple[str, ...] = ()
    tails: Mapping[Link, Tail] = field(default_factory=dict)
    factors: frozenset[Link] = frozenset()
    is_trial: bool = False
    only_names: bool = False
    _mean_loss: Tensor | None = None

    notes = UNHEARD
    """The reports of this step to an engine that may replay it."""
    released = False
    """Whether the step is for one parameter whose gradient is released.

    Changes of scalars that all parameters share then apply only to the next step.
    """

    def again(self, groups: Groups, loss: Loss, notes: Notes = UNHEARD) -> Step:
        """Return a new step with the same settings as this step, and with an empty record.

        An engine that records steps passes groups and a loss with tensors in place of numbers.
        """
        twin = copy.copy(self)
        twin.groups = groups
        twin.loss = loss
        twin.record = {}
        twin.notes = notes
        return twin

    def unmeasured(self) -> Step:
        """Return a new step like this step. Its links create state but measure nothing."""
        twin = self.again(self.groups, self.loss, self.notes)
        twin.only_names = True
        return twin

    def __enter__(self) -> Step:
        self.sessions: list[Session] = []
        self.new: list[dict[str, Any]] = []  # the state of parameters in their first step
        self.skip = Skip()
        self.ended_early = False  # whether the host has read that a guard skips the step
        self.counted: set[str] = set()  # the paths of links that have counted the step
        self.measured: dict[Any, Tensor] = {}  # statistics of the gradients
        self.meters: list[Tensor] = []  # counts of elements for `lost`
        self.gradients = StepGradients(self.place)
        self.opener = self.engine
        return self

    def cohorts(
        self, gradient: Callable[[Tensor], Tensor | None] | None = None, moves: bool = False
    ) -> Sequence[tuple[Cohort, Sequence[Any]]]:
        """Return the cohorts of all parameters that have a gradient, with their gradients.

        Args:
            gradient: A function that returns the gradient of a parameter. By default, gradients are
                read from `place`.
            moves: Whether the step changes the parameters. Gradients that share memory with a
                parameter are then copied.
        """
        for session in self.sessions:
            session.close()  # stores what earlier buckets keep in other memory
        self.measured.clear()
        rows: list[list[Tensor]] = [group["params"] for group in self.groups]
        if gradient is None:
            given = self.gradients.of(rows, moves)
        else:
            given = [list(map(gradient, params)) for params in rows]
        self.opener = self.engine.in_turn() if self.gradients.shared else self.engine
        return self.roster.of(self.groups, given)

    @property
    def world_size(self) -> int:
        """The number of ranks that run this step. It is 1 in a trial."""
        return 1 if self.is_trial else rank_and_world()[1]

    def mean_loss(self, path: str, device: torch.device) -> Tensor:
        """Return the mean over all ranks of the reported loss, on a device."""
        if self.loss is None:
            raise RuntimeError(
                f"{path} needs the loss of each step: call opt.report(loss=loss) before "
                "opt.step(), or call opt.step(closure) with a closure that returns the loss"
            )
        if self._mean_loss is None:
            if isinstance(self.loss, Tensor):
                self._mean_loss = self.loss.to(device, wide(device))
            else:  # filled on the device, because a copy from the host would synchronize
                self._mean_loss = torch.full((), self.loss, dtype=wide(device), device=device)
            if self.world_size > 1:
                self._mean_loss = gather(self._mean_loss.view(1), None).mean()
        return self._mean_loss.to(device)

    def opened(self, session: Session) -> Session:
        """Return a session, after registering it. The step closes the session at the end."""
        session.skip = self.skip
        self.sessions.append(session)
        return session

    def draw(self, index: int, draws: tuple[str, str]) -> tuple[int, Tensor]:
        """Return the seed of a group, and the count of steps that have drawn random numbers.

        The count includes this step.

        Args:
            index: The index of the group.
            draws: The names of the seed and of the count.
        """
        seed, step = draws
        if step not in self.drawn:
            for group in self.groups:
                self.skip.hold([group["chain"][step]])
                group["chain"][step].add_(1)
            self.drawn = *self.drawn, step
        chain = self.groups[index]["chain"]
        return chain[seed], chain[step]

    def lost(self) -> dict[str, Tensor]:
        """Return the metrics of lost updates.

        "moving" is the number of elements that would have changed in float32. "lost" is the share
        of these elements that did not change, because the update was rounded away.
        """
        home = self.meters[0].device
        moving, stayed = torch.stack([counts.to(home) for counts in self.meters]).sum(dim=0)
        return {"moving": moving, "lost": stayed / moving.clamp(min=1)}

    def close(self) -> None:
        """Close all sessions, and restore saved values if the step is skipped."""
        for session in self.sessions:
            session.close()
        self.sessions.clear()
        self.skip.put_back()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            try:
                self.close()
            except Skipped:
                kind = Skipped
        if kind is Skipped:
            self.ended_early = True
            self.skip.put_back()
            for state in self.new:  # links before the guard may have created it in this step
                state.clear()
        return kind is Skipped
