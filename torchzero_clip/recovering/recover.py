"""Recover: a run that goes wrong goes back to where it was well, and on without the batches."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from torchzero_clip.attach.handle import Attached
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.recovering.arguments import (
    check_numbers,
    check_run,
    check_slower,
    loss_of,
    need,
)
from torchzero_clip.recovering.judging import Look, judged, limit_of
from torchzero_clip.recovering.snapshot import Snapshot
from torchzero_clip.study.recorder import Recorder

T = TypeVar("T")
UNSEEN = "a loader that would go back unseen: write `for batch in recover.batches(loader):`"
EARLY = (
    "the run has to begin well, so look at its first batches, its rate and its warm-up, and resume "
    "one that went on from a checkpoint from an earlier one"
)
LASTING = (
    "it is not a few batches, so look at the rate, at the data from here on, and at whether losses "
    "of this size are the new level; `most` allows more"
)
BROKEN = "weights or state have numbers that are not finite"
REMOVED = (
    "this Recover was removed, or replaced by a newer one of the same optimizer: call step() of "
    "that one"
)
OTHER_RANKS = (
    "Recover: the snapshots of the checkpoint were saved on another rank or on another number of "
    "ranks, so the run has none until the next look at which all is well. Save "
    "recover.state_dict() on every rank to keep them"
)


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
    told: list[bool] = field(default_factory=list)  # of each step in `rows`: had it a loss?
    moved: list[bool] = field(default_factory=list)  # and did the optimizer take a step?
    losses: list[float] = field(default_factory=list)  # of good steps
    drawn: int = 0  # batches
    ends: list[int] = field(default_factory=lambda: [0])  # those before each step of `rows`
    bad: list[int] = field(default_factory=list)  # those of bad steps since the snapshot
    left_out: list[int] = field(default_factory=list)  # those that the run goes without
    again: int = 0  # times that the run went back since there was a new snapshot
    slow_until: int = 0  # the step

    def state_dict(self) -> dict[str, Any]:
        """Return plain data, with the rows of the steps that nobody has looked at yet."""
        return {**asdict(self), "rows": self.rows[: len(self.told)].tolist()}

    def read(self) -> tuple[list[Look], bool]:
        """Return the steps since the last look, and whether all ranks have told all losses.

        All ranks get the same. Only here the host waits.
        """
        losses, why = self.rows[: len(self.told)].unbind(1)
        told, moved = torch.tensor([self.told, self.moved], device=losses.device)
        broken, ranks, world = ~losses.isfinite(), torch.distributed, 1
        table = torch.stack([losses.where(~broken, 0), broken, why > 0, told, moved], dim=1)
        if ranks.is_available() and ranks.is_initialized():
            world = ranks.get_world_size()
            ranks.all_reduce(table)
        looks, whole = list[Look](), True
        for loss, broke, skipped, given, stepped in table.tolist():
            mean = loss / max(given, 1)
            looks.append(Look(mean, broke > 0, skipped > 0, given > 0, stepped > 0))
            whole = whole and given == world
        return looks, whole

    def clear(self, check: int) -> None:
        """Begin the steps of the next look."""
        self.rows = self.rows.new_zeros(check, 2)
        self.told.clear()
        self.moved.clear()


class Recover:
    """Go back to a snapshot in host memory where a run goes wrong, and on without the batches.

    A step is bad where a guard skipped it, or where its loss is no finite number or stands out
    above the last good ones. The host looks at them once in `check` steps. Where more than half are
    bad, or weights are no numbers, the model, the optimizer, the parts and all random states become
    what they were in the last snapshot. Where it goes wrong again before there is another one, it
    is taken again, from half of `most` times on the one before, and then a RuntimeError says so.

    An optimizer has one Recover: a new one takes the place of the one before.

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
            `now.left_out`, the batches that the run goes without, counted from 1.

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
        opt: Modular | Attached,
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
        parts = check_run(opt, model, parts)
        numbers = {"every": every, "keep": keep, "check": check, "window": window, "most": most}
        check_numbers({**numbers, "sigmas": sigmas})
        self.slower = check_slower(opt, slower)
        self.every, self.check, self.most = every, check, most
        self.sigmas, self.window = sigmas, window
        self.events, self._opt, self._parts = list[Back](), opt, parts
        mine = [opt._optimizer(), opt, opt.after] if isinstance(opt, Attached) else [opt]
        optimizers = [each for each in mine if each is not None]  # the one that moves weights first
        self._spare = [Snapshot(optimizers, model, parts) for _ in range(keep)]
        self._ring, device = list[Snapshot](), params_of(opt)[0].device
        self.now = Progress(torch.zeros(check, 2, dtype=wide(device), device=device))
        self._moved = False  # whether the optimizer has taken a step since the last call of `step`
        self._loader: Iterable[Any] | None = None  # one that can go back
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []  # groups with a smaller rate
        self._begin_on(optimizers[0])

    def _begin_on(self, optimizer: Optimizer) -> None:
        """Watch the steps of an optimizer, in the place of an earlier Recover."""
        earlier = ACTIVE.get(optimizer)
        if earlier is not None and (replaced := earlier()) is not None:
            replaced.remove()
        ACTIVE[optimizer] = weakref.ref(self)
        self._hooks = [
            optimizer.register_step_pre_hook(calling(self._before_step)),
            optimizer.register_step_post_hook(calling(self._after_step)),
        ]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)

    def remove(self) -> None:
        """Take the hooks off the optimizer. It is over then: `step` raises an error.

        A new Recover on the same optimizer does this to the one before.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._restore_rates()

    # ------------------------------------------------------------------ in the loop

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader, without those that are left out.

        A loader among the parts goes back with the run, and the good batches come again. Any other
        goes on, and all batches since the snapshot are left out.
        """
        goes_back, batches = any([part is loader for part in self._parts]), iter(loader)
        if goes_back:
            self._loader, self._iterator = loader, batches
        while True:
            try:
                batch = next(self._iterator if goes_back else batches)
            except StopIteration:
                return
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
        loss = loss_of(loss)
        need(self._hooks, REMOVED, RuntimeError)
        self._restore_rates()  # of a step that raised an error
        now, moved = self.now, self._moved
        self._moved = False
        row = now.rows[len(now.told)]
        if isinstance(loss, Tensor):
            row[0].copy_(loss)
        elif loss is not None:
            row[0].fill_(loss)
        records = self._opt._records.values() if moved else ()  # else they are of an earlier step
        for why in [x["why"] for x in records if isinstance(x, dict) and "why" in x]:
            row[1].add_(why.to(row.device))
        now.told.append(loss is not None)
        now.moved.append(moved)
        now.count += 1
        now.ends.append(now.drawn)
        return None if now.count % self.check else self._look()

    def _look(self) -> Back | None:
        """Judge the last steps: go back, take a snapshot, or let the run go on."""
        now = self.now
        summing = not now.moved[-1]  # the gradients of the last steps, which are still to be used
        rows, told = now.read()
        now.clear(self.check)
        bad, why = judged(rows, limit_of(now.losses, self.sigmas, self.window))
        for row, is_bad, *ends in zip(rows, bad, now.ends, now.ends[1:], strict=False):
            if is_bad:
                now.bad += range(ends[0] + 1, ends[1] + 1)
            elif row.told:
                now.losses.append(row.loss)
        now.losses, now.ends = now.losses[-self.window :], now.ends[-1:]
        if not (why or told or self._opt.safe_to_save(0)):
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
                self._take(summing)
            elif not self._opt.safe_to_save(0):
                why = BROKEN
        return self._go_back(why) if why else None

    def _take(self, summing: bool = False) -> None:
        """Take a snapshot, in the place of the oldest if there is no other."""
        snapshot = self._spare.pop() if self._spare else self._ring.pop(0)
        snapshot.take(copy.deepcopy(self.now), summing)
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
        if self._loader is None:
            now.drawn = now.ends[-1] = was.drawn  # the data goes on
        elif trusted and was.bad:
            out &= {*was.bad}
        now.again, now.left_out, now.bad = was.again + 1, sorted({*was.left_out, *out}), []
        if self._loader is not None:
            self._iterator = iter(self._loader)
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

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make the rate smaller for this step, if the run went back a short while ago."""
        self._restore_rates()  # of a step that raised an error
        if self.now.count >= self.now.slow_until:
            return None
        for group in optimizer.param_groups:
            smaller = group["lr"] * self.slower[0]
            self._rates.append((group, group["lr"], smaller))
            group["lr"] = smaller
        # torch calls no hook behind a step that raises, and a closure often does
        kept = [self._restoring(x) if callable(x) else x for x in args]
        return tuple(kept), {k: self._restoring(x) if callable(x) else x for k, x in kwargs.items()}

    def _restoring(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure that gives the rates back before it raises an error."""

        def restoring(*args: Any, **kwargs: Any) -> Any:
            try:
                return closure(*args, **kwargs)
            except BaseException:
                self._restore_rates()
                raise

        return restoring

    def _after_step(self, *_: Any) -> None:
        self._moved = True
        self._restore_rates()

    def _restore_rates(self) -> None:
        """Put the rates back that schedules are to see: they multiply what they have left.

        A rate that somebody has set since stays.
        """
        for group, rate, smaller in self._rates:
            here = group["lr"]
            if here is smaller or not (isinstance(here, Tensor) or here != smaller):
                group["lr"] = rate
        self._rates = []

    # ------------------------------------------------------------------ on disk

    @property
    def nbytes(self) -> int:
        """How much host memory the snapshots take."""
        return sum([host.nbytes for snapshot in self._ring for host in snapshot.hosts])

    def state_dict(self, *, snapshots: bool = True) -> dict[str, Any]:
        """Return what a checkpoint needs, so that a run that loads it is the run that went on.

        The snapshots share their memory with later ones: save what this returns, or copy it. On
        several ranks each one saves its own.

        Args:
            snapshots: Whether the snapshots are in it, each as large as the weights and the state.
                Without them the run that loads it takes its first one when all is well again, and
                cannot go back before that.
        """
        shown = [
            {**snapshot.state_dict(), "progress": snapshot.progress.state_dict()}
            for snapshot in (self._ring if snapshots else ())
        ]
        return {**self.now.state_dict(), "snapshots": shown, "rank": list(rank_and_world())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was saved, after everything else is loaded.

        On several ranks all of them call it.
        """
        keys = set(state_dict) if isinstance(state_dict, Mapping) else set()
        given = list(state_dict) if keys else type(state_dict).__name__
        what = f"load_state_dict takes what state_dict of a Recover gave, got {given}"
        need(keys == {*vars(self.now), "snapshots", "rank"}, what)
        saved = copy.deepcopy(dict(state_dict))  # whose memory later snapshots take
        snapshots, rank = saved.pop("snapshots"), tuple(saved.pop("rank"))
        if not all_agree(rank == rank_and_world(), self.now.rows.device):
            if snapshots:
                warn(OTHER_RANKS)
            snapshots = []
        loaded = list[Snapshot]()
        spare = [*self._spare, *self._ring]
        for one in snapshots[-len(spare) :]:
            snapshot = spare.pop()
            snapshot.load_state_dict(one, self._progress(one["progress"]))
            loaded.append(snapshot)
        self.now = self._progress(saved)
        self._spare, self._ring, self._moved = spare, loaded, False

    def _progress(self, saved: Mapping[str, Any]) -> Progress:
        """Return a progress that `state_dict` gave, with room for the steps until the next look.

        `check` may be another now, and so the next look may come sooner or later.
        """
        made = Progress(**{**saved, "rows": self.now.rows})
        seen = len(made.told)
        made.rows = self.now.rows.new_zeros(seen + self.check - made.count % self.check, 2)
        if seen:
            made.rows[:seen].copy_(made.rows.new_tensor(saved["rows"]))
        made.losses = made.losses[-self.window :]
        return made


ACTIVE: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Recover]] = weakref.WeakKeyDictionary()
"""The Recover of each optimizer."""


def calling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a method as long as its object lives, and is not compiled."""
    found = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        bound = found()
        return None if bound is None else bound(*args)

    return torch.compiler.disable(hook)  # type: ignore[no-any-return, unused-ignore]


def rank_and_world() -> tuple[int, int]:
    """Return the number of this rank, and how many there are."""
    ranks = torch.distributed
    if not (ranks.is_available() and ranks.is_initialized()):
        return 0, 1
    return ranks.get_rank(), ranks.get_world_size()


def all_agree(flag: bool, device: torch.device) -> bool:
    """Return whether a flag is set on all ranks."""
    if rank_and_world()[1] == 1:
        return flag
    found = torch.tensor(int(flag), dtype=torch.int32, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
    return bool(found)
