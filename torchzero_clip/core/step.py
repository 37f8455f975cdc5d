"""Step: what the buckets of one step share, how it ends, the loss that it is told, and the notes
that it leaves for whoever may do it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.cohort import Cohort, Roster
from torchzero_clip.core.engine import Engine, Session
from torchzero_clip.core.gradients import USUAL, GradPlace, StepGradients
from torchzero_clip.core.link import Link
from torchzero_clip.core.plan import Tail
from torchzero_clip.core.sharding.collectives import gather
from torchzero_clip.core.skip import Skip, Skipped
from torchzero_clip.core.tensor_kinds import wide

Groups: TypeAlias = Sequence[dict[str, Any]]
Loss: TypeAlias = "Tensor | float | None"


class Notes:
    """They listen to nothing: the step is done once. An engine that replays steps has its own."""

    def made(self, why: str) -> None:
        """Something comes to be, or begins anew, in this step alone."""

    def host(self, why: str) -> None:
        """Something is decided on the host, so that no step could be done again."""

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """The answer of a function, which must be the same where the step is replayed."""
        return function(*args)

    def number(self, device: torch.device, function: Callable[..., float], *args: Any) -> Any:
        """The answer of a function; where the step is replayed a tensor that is filled anew."""
        return function(*args)

    def count(self, groups: Sequence[Mapping[str, Any]], key: str, by: int) -> int:
        """A count of steps that every group keeps, this one included."""
        now = counted(groups, key, by)
        for group in groups:
            group["chain"][key] = now
        return now


def counted(groups: Sequence[Mapping[str, Any]], key: str, by: int) -> int:
    """The count of the step that comes."""
    return int(groups[0]["chain"].get(key, 0)) + by


UNHEARD = Notes()


def one_number(loss: Any) -> Loss:
    """A loss as a number or a tensor that needs no gradient; None where it is no number."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach().reshape(())
    try:
        return float(loss) if isinstance(loss, (int, float)) else None
    except OverflowError:
        return None


def evaluate(closure: Callable[[], Any]) -> Any:
    """The loss of a closure, with gradients."""
    if not callable(closure):
        raise TypeError(f"step takes a closure, a function that gives the loss, got {closure!r}")
    with torch.enable_grad():
        return closure()


class Step:
    """A step: what all its buckets share. It opens and closes their sessions.

    As a context manager it closes them at the end, and ends early where it is skipped.

    Args:
        groups: The parameter groups.
        states: The state of each parameter, `optimizer.state`.
        record: The measurements of the links, by path; `metrics()` reads them.
        engine: Where arithmetic is done.
        process_group: Processes that hold the rest of the model.
        roster: The cohorts of the groups, from the step before.
        loss: The loss that was reported for the step.
        live: The keys of live values, and in their order the values of each group.
        rounding: How parameters in half precision take their update, where it is not as torch does.
        place: The place of the gradients.
        kind: What else must be as it was for a step to be like another; no step is like one
            without a kind.

    Attributes:
        notes: What the step tells of itself, where it may be replayed.
    """

    notes: Notes = UNHEARD
    drawn: tuple[str, ...] = ()  # the counts of steps that have counted this one, as they draw
    released = False  # whether it is of one parameter: what is kept once is for the next
    is_trial = False  # whether this rank takes the step alone, for a look
    tails: Mapping[Link, Tail] = {}  # the tails of the chain, in an engine that fuses
    factors: frozenset[Link] = frozenset()  # the norm rules by whose ratio a tail divides
    only_names = False  # whether links leave NaN for `metrics()`, because nothing is measured
    _mean_loss: Tensor | None = None

    def __init__(
        self,
        groups: Groups,
        states: Mapping[Tensor, dict[str, Any]] | None,
        record: dict[str, Any],
        engine: Engine,
        process_group: Any = None,
        roster: Roster | None = None,
        loss: Loss = None,
        live: tuple[Iterable[str], Sequence[Sequence[Any]]] = ((), ()),
        rounding: str = "",
        place: GradPlace = USUAL,
        kind: Hashable = None,
    ) -> None:
        self.live, self.kind, self.rounding = live, kind, rounding
        self.groups, self.states, self.record = groups, states, record
        self.engine, self.process_group, self.loss = engine, process_group, loss
        self.roster, self.place = Roster() if roster is None else roster, place

    def again(self, groups: Groups, loss: Loss, notes: Notes = UNHEARD) -> Step:
        """This step, which has not begun, with tensors for live values and for the loss."""
        made = copy.copy(self)
        made.groups, made.loss, made.record, made.notes = groups, loss, {}, notes
        return made

    def unmeasured(self) -> Step:
        """Return a step like this one in which links make their state and measure nothing."""
        made = self.again(self.groups, self.loss, self.notes)
        made.only_names = True
        return made

    def __enter__(self) -> Step:
        self.sessions: list[Session] = []
        self.new: list[dict[str, Any]] = []  # state of parameters that begin
        self.skip = Skip()
        self.ended_early = False  # whether the host has read that a guard skips the step
        self.counted: set[str] = set()  # the paths of links that have counted the step
        self.measured: dict[Any, Tensor] = {}  # statistics of the gradients
        self.meters: list[Tensor] = []  # of what rounding has lost: see `Nearest`
        self.gradients, self.opener = StepGradients(self.place), self.engine
        return self

    def cohorts(
        self, gradient: Callable[[Tensor], Tensor | None] | None = None, moves: bool = False
    ) -> Sequence[tuple[Cohort, Sequence[Any]]]:
        """The parameters that have a gradient, in cohorts of a group, and their gradients."""
        if self.sessions:
            self.close()  # what earlier buckets keep in other memory is stored first
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
        """The number of ranks that take this step: 1 in a trial, which asks no other rank."""
        ranks = torch.distributed
        if self.is_trial or not (ranks.is_available() and ranks.is_initialized()):
            return 1
        return int(ranks.get_world_size())

    def mean_loss(self, path: str, device: torch.device) -> Tensor:
        """The loss that was reported, on a device: the mean over all ranks."""
        if self.loss is None:
            raise RuntimeError(
                f"{path} needs the loss of each step: call opt.report(loss=loss) before "
                "opt.step(), or give step a closure that returns it"
            )
        if self._mean_loss is None:
            self._mean_loss = torch.as_tensor(self.loss, dtype=wide(device), device=device)
            if self.world_size > 1:
                self._mean_loss = gather(self._mean_loss.view(1), None).mean()
        return self._mean_loss.to(device)

    def opened(self, session: Session) -> Session:
        """The session, to be closed with the step."""
        session.skip = self.skip
        self.sessions.append(session)
        return session

    def draw(self, index: int, draws: tuple[str, str]) -> tuple[int, Tensor]:
        """The seed of a group, and the count of the steps that have drawn, this one included."""
        seed, step = draws
        if step not in self.drawn:
            for group in self.groups:
                self.skip.hold([group["chain"][step]])
                group["chain"][step].add_(1)
            self.drawn = *self.drawn, step
        chain = self.groups[index]["chain"]
        return chain[seed], chain[step]

    def lost(self) -> dict[str, Tensor]:
        """How many entries would have moved in float32, and the share of them that stayed."""
        home = self.meters[0].device
        moving, stayed = torch.stack([counts.to(home) for counts in self.meters]).sum(dim=0)
        return {"moving": moving, "lost": stayed / moving.clamp(min=1)}

    def close(self) -> None:
        """Close all sessions: updates that were deferred and then dropped are computed."""
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
            for state in self.new:  # made by the links before the one that read the flag
                state.clear()
        return kind is Skipped
