"""Recover: a run that goes wrong goes back to where it was well, and on without the batches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from torchzero_clip.attach.handle import Attached
from torchzero_clip.core.outside import warn
from torchzero_clip.core.tensors import wide
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.recovering.judging import Look, judged, limit_of
from torchzero_clip.recovering.snapshot import Snapshot
from torchzero_clip.study.recorder import Recorder

T = TypeVar("T")
UNSEEN = "a loader that would go back unseen: write `for batch in recover.batches(loader):`"
EARLY = "the run has to begin well, so look at its first batches, its rate and its warm-up"
LASTING = (
    "it is not a few batches, so look at the rate, at the data from here on, and at whether losses "
    "of this size are the new level; `most` allows more"
)
BROKEN = "weights or state have numbers that are not finite"


class Back(NamedTuple):
    """A way back.

    Attributes:
        step: The step behind which the trouble was seen.
        to: The step behind which the run goes on.
        why: What was seen.
        left_out: How many batches are left out.
    """

    step: int
    to: int
    why: str
    left_out: int


@dataclass
class Progress:
    """Where a run is, and what it is judged by."""

    rows: Tensor  # of each step since the last look: its loss, and why it was skipped
    count: int = 0  # of steps
    losses: list[float] = field(default_factory=list)  # of good steps
    drawn: int = 0  # batches
    ends: list[int] = field(default_factory=lambda: [0])  # those before each step of `rows`
    bad: list[int] = field(default_factory=list)  # those of bad steps since the snapshot
    left_out: list[int] = field(default_factory=list)  # of a loader that goes back
    again: int = 0  # times that the run went back since there was a new snapshot
    slow_until: int = 0  # the step


class Recover:
    """Go back to a snapshot in host memory where a run goes wrong, and on without the batches.

    A step is bad where a guard skipped it, or where its loss is no finite number or stands out
    above the last good ones. The host looks at them once in `check` steps. Where more than half are
    bad, or weights are no numbers, the model, the optimizer, the parts and all random states become
    what they were in the last snapshot. Where it goes wrong again before there is another one, it
    is taken again, from half of `most` times on the one before, and then a RuntimeError says so.

    Args:
        opt: A Modular, or the handle that `attach` returned.
        model: The model that it trains.
        every: A snapshot is taken so many steps after the last, or at the next look where all is
            well again: no bad step since the look before, and `safe_to_save`.
        keep: How many snapshots there are, each as large as the weights and the state.
        parts: What else has `state_dict` and `load_state_dict` and belongs to the run: schedules, a
            GradScaler, a Recorder, a loader.
        check: The steps from one look to the next. `every` is a multiple.
        sigmas: How many standard deviations a loss may be above the mean.
        window: The number of good losses that these are of.
        most: How often a run may go back before there is a new snapshot.
        slower: A factor for the rate and a number of steps for which it holds behind a way back.

    Attributes:
        events: Every way back, as a `Back`.
        now: Where the run is: `now.count` steps without those that were taken back, and
            `now.left_out`, which batches of a loader among the parts, counted from 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Guard, Modular, Recover
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Guard(), Adam(), LR(1e-3))
        >>> schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
        >>> recover = Recover(opt, model, parts=[schedule])
        >>> for x in recover.batches(torch.randn(100, 64, 10)):
        ...     loss = model(x).square().mean()
        ...     opt.zero_grad()
        ...     loss.backward()
        ...     opt.step()
        ...     schedule.step()
        ...     back = recover.step(loss)  # last
    """

    def __init__(
        self,
        opt: Modular,
        model: Module,
        *,
        every: int = 200,
        keep: int = 2,
        parts: Iterable[Any] = (),
        check: int = 10,
        sigmas: float = 6.0,
        window: int = 128,
        most: int = 8,
        slower: tuple[float, int] = (1.0, 0),
    ) -> None:
        numbers = {"every": every, "keep": keep, "check": check, "window": window, "most": most}
        check_arguments(opt, parts := list(parts), {**numbers, "sigmas": sigmas}, slower)
        self.every, self.check, self.most, self.slower = every, check, most, slower
        self.events, self._opt, self._parts = list[Back](), opt, parts
        self.sigmas, self.window = sigmas, window
        mine = [opt._optimizer(), opt, opt.after] if isinstance(opt, Attached) else [opt]
        optimizers = [each for each in mine if each is not None]  # the one that moves weights first
        self._spare = [Snapshot(optimizers, model, parts) for _ in range(keep)]
        self._ring, device = list[Snapshot](), params_of(opt)[0].device
        self.now = Progress(torch.zeros(check, 2, dtype=wide(device), device=device))
        self._rates, self._told, self._last = list[Any](), False, opt._records
        self._loader: Iterable[Any] | None = None  # one that can go back
        optimizers[0].register_step_pre_hook(self._slow_down)
        optimizers[0].register_step_post_hook(self._as_before)

    # ------------------------------------------------------------------ in the loop

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader, without those that are left out.

        A loader among the parts goes back with the run, and the good batches come again. Any other
        goes on, and all batches since the snapshot are left out.
        """
        goes_back, batches = any([part is loader for part in self._parts]), iter(loader)
        if goes_back:
            self._loader, self._iterator = loader, batches
        for batch in iter(lambda: next(self._iterator if goes_back else batches, END), END):
            self.now.drawn += 1
            if self.now.drawn not in self.now.left_out:
                yield batch

    @torch.no_grad()
    def step(self, loss: Tensor | float | None = None) -> Back | None:
        """End a step of the loop: the last call in it, behind those of optimizer and schedules.

        In a distributed run all ranks must call it in every step.

        Args:
            loss: The loss of the step, which stays on the device. Without one weights and state are
                looked at instead, which is a pass over memory once in `check` steps.

        Returns:
            What happened where the run has gone back; otherwise None.
        """
        now, records = self.now, self._opt._records
        row, self._told = now.rows[now.count % self.check], loss is not None
        if isinstance(loss, Tensor):
            row[0].copy_(loss.detach().reshape(()))
        elif loss is not None:
            row[0].fill_(loss)
        if records is not self._last:  # else a GradScaler has left the step out
            for why in [x["why"] for x in records.values() if isinstance(x, dict) and "why" in x]:
                row[1].add_(why.to(row.device))
        self._last = records
        now.count += 1
        now.ends.append(now.drawn)
        return None if now.count % self.check else self._look()

    def _look(self) -> Back | None:
        """Judge the last steps: go back, take a snapshot, or let the run go on."""
        now, rows = self.now, self._read()
        bad, why = judged(rows, limit_of(now.losses, self.sigmas, self.window))
        for row, is_bad, *ends in zip(rows, bad, now.ends, now.ends[1:], strict=False):
            now.bad += range(ends[0] + 1, ends[1] + 1) if is_bad else ()
            now.losses += [] if is_bad else [row.loss]
        now.losses, now.ends = now.losses[-self.window :], now.ends[-1:]
        if not (why or self._told or self._opt.safe_to_save(0)):
            why = BROKEN
        last = self._ring[-1].progress.count if self._ring else -1
        due = now.count // self.every > last // self.every
        if due and not (why or any(bad)):
            for part in self._parts:
                seen = not hasattr(part, "__iter__") or isinstance(part, Module)
                what = f"the parts have a {type(part).__name__}, {UNSEEN}"
                need(seen or part is self._loader, what, RuntimeError)
            if self._opt.safe_to_save(self.check):
                now.again, now.bad = 0, []
                self._take()
            elif not self._opt.safe_to_save(0):
                why = BROKEN
        return self._go_back(why) if why else None

    def _read(self) -> list[Look]:
        """The steps since the last look, alike on all ranks; the host waits here alone."""
        losses, why = self.now.rows.unbind(1)
        broken, ranks, world = ~losses.isfinite(), torch.distributed, 1
        table = torch.stack([losses.where(~broken, 0), broken, why > 0], dim=1)
        if ranks.is_available() and ranks.is_initialized():
            world = ranks.get_world_size()
            ranks.all_reduce(table)
        self.now.rows.zero_()
        return [Look(x / world, broken > 0, skipped > 0) for x, broken, skipped in table.tolist()]

    def _take(self) -> None:
        """Take a snapshot, in the place of the oldest where there is no other."""
        snapshot = self._spare.pop() if self._spare else self._ring.pop(0)
        snapshot.take(copy.deepcopy(self.now))
        self._ring.append(snapshot)

    def _go_back(self, why: str) -> Back:
        was, told = self.now, f"step {self.now.count}: {why}"
        need(self._ring, f"{told}, before there was a snapshot: {EARLY}", RuntimeError)
        often = f"after the run has gone back {self.most} times in a row"
        need(was.again < self.most, f"{told}, {often}: {LASTING}", RuntimeError)
        trusted = 2 * was.again < self.most
        if not trusted and len(self._ring) > 1:
            self._spare.append(self._ring.pop())
        snapshot = self._ring[-1]
        snapshot.put_back()
        now = self.now = copy.deepcopy(snapshot.progress)
        out = set(range(now.drawn + 1, was.drawn + 1)) - {*was.left_out}
        now.again, now.left_out, now.bad = was.again + 1, was.left_out, []
        if self._loader is not None:
            out = out & {*was.bad} if trusted and was.bad else out
            now.left_out = sorted({*was.left_out, *out})
            self._iterator = iter(self._loader)
        else:
            now.drawn = now.ends[-1] = snapshot.progress.drawn = was.drawn
        snapshot.set_random()
        undone = was.count - now.count
        back = Back(was.count, now.count, why, len(out) if was.drawn else undone)
        self.events.append(back)
        for part in [part for part in self._parts if isinstance(part, Recorder)]:
            part.log(**{"recover/back": undone, "recover/left_out": back.left_out})
        now.slow_until = now.count + self.slower[1]
        on = f"the run goes on behind step {now.count}, without {back.left_out} batches"
        warn(f"Recover: {told}: {on}")
        return back

    # ------------------------------------------------------------------ a smaller rate

    def _slow_down(self, optimizer: Optimizer, *_: Any) -> None:
        if self.now.count < self.now.slow_until:
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.slower[0]

    def _as_before(self, optimizer: Optimizer, *_: Any) -> None:
        """Schedules multiply the rate that they have left."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    # ------------------------------------------------------------------ on disk

    @property
    def nbytes(self) -> int:
        """How much host memory the snapshots take."""
        return sum([host.nbytes for snapshot in self._ring for host in snapshot.hosts])

    def state_dict(self) -> dict[str, Any]:
        """The losses and counts, for a checkpoint; snapshots are not in it."""
        return {**asdict(self.now), "rows": self.now.rows.tolist()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was saved, once all else is loaded: a snapshot is taken here."""
        what = f"load_state_dict takes what state_dict of a Recover gave, got {list(state_dict)}"
        need(state_dict.keys() == vars(self.now).keys(), what)
        rows, given = self.now.rows, copy.deepcopy(dict(state_dict))
        self.now = Progress(**{**given, "rows": rows.new_tensor(given["rows"])})
        self._spare, self._ring = [*self._spare, *self._ring], []
        self._take()


END: Any = object()


def need(fine: Any, sentence: str, kind: type[Exception] = ValueError) -> None:
    """Raise a sentence unless something is fine."""
    if not fine:
        raise kind(f"Recover: {sentence}")


def check_arguments(opt: Any, parts: Sequence[Any], numbers: dict[str, Any], slower: Any) -> None:
    """Raise a sentence unless the arguments of Recover are what they should be."""
    steps = isinstance(opt, Modular) and (opt._makes_steps or isinstance(opt, Attached))
    given = f"got {type(opt).__name__}"
    need(steps, f"takes a Modular or the handle that attach returned, {given}", TypeError)
    for part in parts:
        has = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        given = f"got {type(part).__name__}: what has not goes on as it is"
        need(has, f"parts have state_dict and load_state_dict, {given}", TypeError)
    for name, value in numbers.items():
        kinds, least = ((int, float), 0) if name == "sigmas" else ((int,), 1 + (name == "window"))
        fine = type(value) in kinds and value >= least
        words = "an integer " * (kinds == (int,)) + f"at least {least}"
        need(fine, f"{name} must be {words}, got {value!r}")
    what = f"every must be a multiple of check={numbers['check']}, the steps between two looks"
    need(numbers["every"] % numbers["check"] == 0, f"{what}, got {numbers['every']}")
    what = "slower must be a factor up to 1 for the rate and a number of steps, as (0.5, 100)"
    need(isinstance(slower, tuple) and 0 < slower[0] <= 1, f"{what}, got {slower!r}")
    rated = slower[0] == 1 or "lr" in opt.defaults or isinstance(opt, Attached)
    need(rated, "slower needs a rate: put LR at the end of the chain")
