"""Step: what the buckets of one step share, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.engine import Engine, Session
from torchzero_clip.core.gradients import StepGradients
from torchzero_clip.core.part import Part, Roster
from torchzero_clip.core.sharding import gather
from torchzero_clip.core.skip import Skip, Skipped
from torchzero_clip.core.stochastic import SEED, STEP
from torchzero_clip.core.tensors import wide


class Counted(int):
    """A count of steps, this one included, and the key that it has in the chain dict of groups."""

    key: str
    by: int


def counted(groups: Sequence[Mapping[str, Any]], key: str, by: int) -> Counted:
    """The count of the next step."""
    found = Counted(int(groups[0]["chain"].get(key, 0)) + by)
    found.key, found.by = key, by
    return found


class Step:
    """A step: what all its buckets share. It opens and closes their sessions.

    As a context manager it closes them at the end, and ends early where it is skipped.

    Args:
        groups: The parameter groups.
        states: The state of each parameter, `optimizer.state`.
        record: The measurements of the links, by path; `metrics()` reads them.
        engine: Where arithmetic is done.
        process_group: Processes that hold the rest of the model.
        roster: The parts of the groups, from the step before.
        loss: The loss that was reported for the step.
        asked: Takes what was asked on the host, where the step is written down.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        states: Mapping[Tensor, dict[str, Any]] | None,
        record: dict[str, Any],
        engine: Engine,
        process_group: Any = None,
        roster: Roster | None = None,
        loss: Tensor | float | None = None,
        asked: Any = None,
    ) -> None:
        self.asked = asked
        self.groups, self.states, self.record = groups, states, record
        self.engine, self.process_group, self.loss = engine, process_group, loss
        self.roster = Roster() if roster is None else roster
        self.sessions: list[Session] = []
        self.new: list[dict[str, Any]] = []  # state of parameters that begin
        self.skip = Skip()
        self.measured: dict[Any, Tensor] = {}  # statistics of the gradients
        self._mean_loss: Tensor | None = None
        self.drawn = False  # whether this step is among those that round state
        self.gradients, self.opener = StepGradients(), engine
        self.released = False  # whether it is of one parameter: what is kept once is for the next

    def parts(
        self, gradient: Callable[[Tensor], Tensor | None] | None = None, moves: bool = False
    ) -> list[tuple[Part, Sequence[Any]]]:
        """The parameters that have a gradient, in parts of a group, and their gradients."""
        self.close()  # deferred updates may be read again
        self.measured.clear()
        self.roster.forget(len(self.groups))
        rows: list[list[Tensor]] = [group["params"] for group in self.groups]
        if gradient is None:
            given = self.gradients.of(rows, moves)
        else:
            given = [list(map(gradient, params)) for params in rows]
        self.opener = self.engine.in_turn() if self.gradients.shared else self.engine
        groups = enumerate(zip(self.groups, given, strict=True))
        return [
            (part, part.of(grads))
            for index, (group, grads) in groups
            for part in self.roster.parts(index, group, grads)
        ]

    def ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """The answer of a function, which must be the same where the step is repeated."""
        answer = function(*args)
        if self.asked is not None:
            self.asked.ask(function, args, answer)
        return answer

    def number(self, device: torch.device, function: Callable[..., float], *args: Any) -> Tensor:
        """The answer of a function as a tensor, which is asked anew where the step is repeated."""
        if self.asked is not None:
            made: Tensor = self.asked.number(device, function, args)
            return made
        return torch.full((), function(*args), dtype=wide(device), device=device)

    def alone(self, why: str) -> None:
        """Note that this step does what those before and after it do not."""
        if self.asked is not None:
            self.asked.alone(why)

    def count(self, key: str, by: int) -> int:
        """A count of steps that every group keeps, this one included."""
        if self.asked is not None:
            count = counted(self.groups, key, by)
            self.asked.count(count)
            return count
        now = int(self.groups[0]["chain"].get(key, 0)) + by  # torch traces no number of ours
        for group in self.groups:
            group["chain"][key] = now
        return now

    def mean_loss(self, path: str, device: torch.device) -> Tensor:
        """The loss that was reported, on a device: the mean over all ranks."""
        if self.loss is None:
            raise RuntimeError(
                f"{path} needs the loss of each step: call opt.report(loss=loss) before "
                "opt.step(), or give step a closure that returns it"
            )
        if self._mean_loss is None:
            self._mean_loss = torch.as_tensor(self.loss, dtype=wide(device), device=device)
            ranks = torch.distributed
            if ranks.is_available() and ranks.is_initialized() and ranks.get_world_size() > 1:
                self._mean_loss = gather(self._mean_loss.view(1), None).mean()
        return self._mean_loss.to(device)

    def opened(self, session: Session) -> Session:
        """The session, to be closed with the step."""
        session.skip = self.skip
        self.sessions.append(session)
        return session

    def draw(self, index: int) -> tuple[int, Tensor]:
        """The seed of a group, and the count of the steps that rounded state, this one included."""
        if not self.drawn:
            for group in self.groups:
                self.skip.hold([group["chain"][STEP]])
                group["chain"][STEP].add_(1)
            self.drawn = True
        chain = self.groups[index]["chain"]
        return chain[SEED], chain[STEP]

    def close(self) -> None:
        """Close all sessions: updates that were deferred and then dropped are computed."""
        for session in self.sessions:
            session.close()
        self.sessions.clear()
        self.skip.put_back()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            try:
                self.close()
            except Skipped:
                kind = Skipped
        if kind is Skipped:
            self.skip.put_back()
            for state in self.new:  # made by the links before the one that read the flag
                state.clear()
        return kind is Skipped
