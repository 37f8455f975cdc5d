"""Recover: roll back a run that diverges to a snapshot, and continue without the bad batches."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from torchzero_clip.attach.handle import Attached
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.ranks import rank_and_world
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
from torchzero_clip.recovering.judging import judged, limit_of
from torchzero_clip.recovering.progress import Progress, all_agree
from torchzero_clip.recovering.snapshot import Snapshot
from torchzero_clip.study.recorder import Recorder

T = TypeVar("T")
UNSEEN = (
    "which is a data loader: replace the loop over this loader with `for batch in "
    "recover.batches(loader):`"
)
EARLY = (
    "check the first batches, the learning rate and its warm-up; if this run was resumed, resume "
    "from an earlier checkpoint"
)
LASTING = (
    "check the learning rate, the data after this step, and whether the loss is really too high. "
    "To allow more rollbacks, pass a larger most="
)
BROKEN = "weights or state contain NaN or infinity"
REMOVED = (
    "this Recover was removed, or replaced by a newer Recover of the same optimizer: call step() "
    "of the newer Recover"
)
OTHER_RANKS = (
    "Recover: the snapshots in the checkpoint were ignored, because a different rank saved "
    "the snapshots, or because the number of ranks has changed. Recover takes a new snapshot "
    "after the next check. To keep snapshots, save recover.state_dict() on each rank, and "
    "load each file on the same rank"
)


class Back(NamedTuple):
    """A rollback that `Recover` has done.

    Attributes:
        step: The step after which `Recover` noticed the divergence.
        to: The step after which the snapshot was taken. Training continues after this step.
        why: The reason for the rollback.
        left_out: The number of batches that training leaves out because of this rollback.
    """

    step: int
    to: int
    why: str
    left_out: int


class Recover:
    """Roll back a run that diverges to a snapshot, and continue without the bad batches.

    Every `every` steps, `Recover` copies the model, the optimizer state and the random states to
    host memory. Such a copy is called a snapshot. Call `recover.step(loss)` at the end of every
    iteration of the training loop.

    Every `check` steps, `Recover` checks the steps since the last check. A step is bad if a guard
    skipped it, if its loss is NaN or infinite, or if its loss is far above the recent good losses.
    `Recover` rolls back to the last snapshot in the following cases:

    - More than half of the steps since the last check are bad.
    - The loss was NaN or infinite in a step that changed the weights.
    - The weights or the optimizer state contain NaN or infinity.

    Training then continues without the bad batches. For each rollback, `Recover` issues a warning.

    If the run diverges again before there is a new snapshot, `Recover` rolls back again. After
    `most / 2` rollbacks without a new snapshot, `Recover` uses an older snapshot. After `most`
    rollbacks, `Recover` raises a `RuntimeError`. If the run diverges before the first snapshot,
    `Recover` also raises a `RuntimeError`.

    Between two checks, `Recover` does not synchronize with the GPU.

    An optimizer has at most one `Recover`. If you create a new `Recover` for the same optimizer, it
    replaces the old one.

    Args:
        opt: A `Modular`, or the handle that `attach` returned.
        model: The model that the optimizer trains.
        every: The number of steps between two snapshots. It must be a multiple of `check`. The
            first snapshot is taken at the first check. `Recover` delays a snapshot until a check
            finds no bad step and `safe_to_save` finds no NaN.
        keep: The number of snapshots in host memory. Each snapshot is as large as the weights and
            the optimizer state together.
        parts: Other objects with `state_dict` and `load_state_dict` that a rollback restores, such
            as learning rate schedulers, a `GradScaler`, a `Recorder`, or a data loader.
        check: The number of steps between two checks.
        sigmas: A loss is bad if it is more than this number of standard deviations above the mean
            of the recent good losses.
        window: The number of recent good losses that `sigmas` refers to. As long as there are fewer
            than `window / 2` good losses, no finite loss is bad.
        most: The number of rollbacks without a new snapshot after which `Recover` raises a
            `RuntimeError`.
        slower: A pair: a factor for the learning rate, and the number of steps after a rollback
            during which the factor applies. For example, `(0.5, 100)` halves the learning rate for
            100 steps.

    Attributes:
        events: All rollbacks, each as a `Back`.
        now: The progress of the run. `now.count` is the number of steps that were not rolled back.
            `now.left_out` is a list of the batches that training leaves out. Batches are numbered
            from 1.

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
        self.every = every
        self.check = check
        self.most = most
        self.sigmas = sigmas
        self.window = window
        self.events: list[Back] = []
        self._opt = opt
        self._parts = parts
        optimizers: list[Optimizer] = [opt]
        if isinstance(opt, Attached):  # the optimizer that changes the weights comes first
            attached_to: list[Optimizer | None] = [opt._optimizer(), opt, opt.after]
            optimizers = [optimizer for optimizer in attached_to if optimizer is not None]
        self._spare = [Snapshot(optimizers, model, parts) for _ in range(keep)]  # not taken yet
        self._ring: list[Snapshot] = []  # the oldest first
        device = params_of(opt)[0].device
        self.now = Progress(torch.zeros(check, 2, dtype=wide(device), device=device))
        self._moved = False  # whether the optimizer has taken a step since the last call of `step`
        self._loader: Iterable[Any] | None = None  # the loader among the parts
        # of each group with a smaller rate: the group, its own rate, and the smaller rate
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []
        self._watch(optimizers[0])

    def _watch(self, optimizer: Optimizer) -> None:
        """Register hooks on an optimizer, and remove an earlier `Recover` of the optimizer."""
        earlier = ACTIVE.get(optimizer)
        if earlier is not None and (replaced := earlier()) is not None:
            replaced.remove()
        ACTIVE[optimizer] = weakref.ref(self)
        self._hooks = [
            optimizer.register_step_pre_hook(weak_hook(self._before_step)),
            optimizer.register_step_post_hook(weak_hook(self._after_step)),
        ]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)

    def remove(self) -> None:
        """Remove the hooks from the optimizer. After that, `step` raises an error.

        A new `Recover` for the same optimizer removes the hooks of the old one.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._restore_rates()

    # ------------------------------------------------------------------ in the loop

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, except the batches that training leaves out.

        If the loader is in `parts`, a rollback sets it back, and only the bad batches are left out.
        Any other loader continues with its next batch, so a rollback leaves out all batches since
        the snapshot.

        Args:
            loader: The data loader, or any iterable of batches. Iterate over
                `recover.batches(loader)` in every epoch.
        """
        goes_back = any([part is loader for part in self._parts])
        batches = iter(loader)
        if goes_back:
            self._loader = loader
            self._iterator = batches
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
        """Record the loss of a step, and roll back if the run diverges.

        Call this method at the end of each iteration of the training loop, after the steps of the
        optimizer and of the learning rate schedulers. With gradient accumulation, call it after
        each batch. In distributed training, call it on all ranks in every iteration.

        Args:
            loss: The loss of the step: a number, or a tensor with one element. A tensor stays on
                its device. Without a loss, `Recover` instead looks for NaN and infinity in the
                weights and in the optimizer state. To do so, it reads all weights and state every
                `check` steps.

        Returns:
            A `Back` if this call has rolled back the run, otherwise None.
        """
        loss = loss_of(loss)
        need(self._hooks, REMOVED, RuntimeError)
        self._restore_rates()  # torch calls no hook after a step that raises an error
        now = self.now
        moved = self._moved
        self._moved = False
        row = now.rows[len(now.told)]
        if isinstance(loss, Tensor):
            row[0].copy_(loss)
        elif loss is not None:
            row[0].fill_(loss)
        if moved:  # otherwise the records are from an earlier step
            for record in self._opt._records.values():
                if isinstance(record, dict) and "why" in record:
                    row[1].add_(record["why"].to(row.device))
        now.told.append(loss is not None)
        now.moved.append(moved)
        now.count += 1
        now.ends.append(now.drawn)
        return None if now.count % self.check else self._check_steps()

    def _check_steps(self) -> Back | None:
        """Judge the steps since the last check: roll back, take a snapshot, or do nothing."""
        now = self.now
        accumulating = not now.moved[-1]
        looks, all_have_losses = now.read()
        now.clear(self.check)
        is_bad, why = judged(looks, limit_of(now.losses, self.sigmas, self.window))
        for look, bad, first, last in zip(looks, is_bad, now.ends, now.ends[1:], strict=False):
            if bad:
                now.bad += range(first + 1, last + 1)
            elif look.told:
                now.losses.append(look.loss)
        now.losses = now.losses[-self.window :]
        now.ends = now.ends[-1:]
        if not (why or all_have_losses or self._opt.safe_to_save(0)):
            why = BROKEN
        newest = self._ring[-1].progress.count if self._ring else -1
        is_due = now.count // self.every > newest // self.every
        if is_due and not (why or any(is_bad)):
            self._check_loaders()
            if self._opt.safe_to_save(self.check):
                now.again = 0
                now.bad = []
                self._take(accumulating)
            elif not self._opt.safe_to_save(0):
                why = BROKEN
        return self._go_back(why) if why else None

    def _check_loaders(self) -> None:
        """Raise an error if a loader among the parts is not iterated through `batches`."""
        for part in self._parts:
            is_loader = hasattr(part, "__iter__") and not isinstance(part, Module)
            message = f"parts contains a {type(part).__name__}, {UNSEEN}"
            need(not is_loader or part is self._loader, message, RuntimeError)

    def _take(self, accumulating: bool = False) -> None:
        """Take a snapshot. If all snapshots are in use, overwrite the oldest one."""
        snapshot = self._spare.pop() if self._spare else self._ring.pop(0)
        snapshot.take(copy.deepcopy(self.now), accumulating)
        self._ring.append(snapshot)

    def _go_back(self, why: str) -> Back:
        """Restore a snapshot, and decide which batches training leaves out from now on."""
        was = self.now
        failure = f"step {was.count}: {why}"
        need(self._ring, f"{failure}, and no snapshot exists yet: {EARLY}", RuntimeError)
        often = f"and {counted(self.most, 'rollback')} did not help"
        need(was.again < self.most, f"{failure}, {often}: {LASTING}", RuntimeError)
        is_trusted = 2 * was.again < self.most
        if not is_trusted and len(self._ring) > 1:
            self._spare.append(self._ring.pop())
        snapshot = self._ring[-1]
        snapshot.put_back()
        now = copy.deepcopy(snapshot.progress)
        self.now = now
        since_snapshot = set(range(now.drawn + 1, was.drawn + 1)) - set(was.left_out)
        new_left_out = since_snapshot
        if self._loader is None:  # the loader continues with its next batch
            now.drawn = was.drawn
            now.ends[-1] = was.drawn
        elif is_trusted and was.bad:
            new_left_out = since_snapshot & set(was.bad)
        now.again = was.again + 1
        now.left_out = sorted({*was.left_out, *new_left_out})
        now.bad = []
        if self._loader is not None:
            self._iterator = iter(self._loader)
        snapshot.set_random()  # after iter(), which may draw a random number
        undone = was.count - now.count
        back = Back(was.count, now.count, why, len(new_left_out) if was.drawn else undone)
        self.events.append(back)
        for part in self._parts:
            if isinstance(part, Recorder):
                part.log(**{"recover/back": undone, "recover/left_out": back.left_out})
        now.slow_until = now.count + self.slower[1]
        on = f"rolled back to step {now.count}, and {back.left_out} batches are skipped"
        warn(f"Recover: {failure}; {on}")
        return back

    # ------------------------------------------------------------------ a smaller learning rate

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reduce the learning rate for this step if the last rollback was recent."""
        self._restore_rates()  # torch calls no hook after a step that raises an error
        if self.now.count >= self.now.slow_until:
            return None
        for group in optimizer.param_groups:
            smaller = group["lr"] * self.slower[0]
            self._rates.append((group, group["lr"], smaller))
            group["lr"] = smaller
        # A closure that raises an error ends the step without the hook that restores the rates.
        args = tuple([self._restoring(x) if callable(x) else x for x in args])
        return args, {k: self._restoring(x) if callable(x) else x for k, x in kwargs.items()}

    def _restoring(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure that restores the learning rates before it raises an error."""

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
        """Restore the learning rates, because a scheduler multiplies the current learning rate.

        If the learning rate was changed during the step, keep the change.
        """
        for group, rate, smaller in self._rates:
            current = group["lr"]
            if current is smaller or not (isinstance(current, Tensor) or current != smaller):
                group["lr"] = rate
        self._rates = []

    # ------------------------------------------------------------------ on disk

    @property
    def nbytes(self) -> int:
        """The number of bytes of host memory that the snapshots use."""
        return sum([host.nbytes for snapshot in self._ring for host in snapshot.hosts])

    def state_dict(self, *, snapshots: bool = True) -> dict[str, Any]:
        """Return the progress of the run and the snapshots, for a checkpoint.

        A run that loads the checkpoint is bitwise identical to a run that was not interrupted.

        The state dict shares memory with the snapshots, and later snapshots overwrite this memory.
        Save the state dict before the next call of `step`, or copy it. In distributed training,
        save it on every rank.

        Args:
            snapshots: Whether to include the snapshots. Each snapshot is as large as the weights
                and the optimizer state together. If the checkpoint has no snapshots, the resumed
                run takes a snapshot at the first check that finds no bad step. Before that check,
                it cannot roll back.
        """
        saved = [
            {**snapshot.state_dict(), "progress": snapshot.progress.state_dict()}
            for snapshot in (self._ring if snapshots else ())
        ]
        return {**self.now.state_dict(), "snapshots": saved, "rank": list(rank_and_world())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        First load the state of the model, the optimizer, the schedulers and the other parts. In
        distributed training, call this method on all ranks.

        Args:
            state_dict: The result of `state_dict`. In distributed training, the result on the same
                rank.
        """
        keys = set(state_dict) if isinstance(state_dict, Mapping) else set()
        received = list(state_dict) if keys else type(state_dict).__name__
        message = f"load_state_dict needs the result of Recover.state_dict(), got {received}"
        need(keys == {*vars(self.now), "snapshots", "rank"}, message)
        saved = copy.deepcopy(dict(state_dict))  # later snapshots overwrite the loaded memory
        snapshots = saved.pop("snapshots")
        rank = tuple(saved.pop("rank"))
        if not all_agree(rank == rank_and_world(), self.now.rows.device):
            if snapshots:
                warn(OTHER_RANKS)
            snapshots = []
        spare = [*self._spare, *self._ring]
        loaded: list[Snapshot] = []
        for state in snapshots[-len(spare) :]:
            snapshot = spare.pop()
            snapshot.load_state_dict(state, self._progress(state["progress"]))
            loaded.append(snapshot)
        self.now = self._progress(saved)
        self._spare = spare
        self._ring = loaded
        self._moved = False

    def _progress(self, saved: Mapping[str, Any]) -> Progress:
        """Return the progress in a state dict, with rows for the steps until the next check.

        If `check` has changed, the next check comes earlier or later than planned.
        """
        progress = Progress(**{**saved, "rows": self.now.rows})
        seen = len(progress.told)
        rows = seen + self.check - progress.count % self.check
        progress.rows = self.now.rows.new_zeros(rows, 2)
        if seen:
            progress.rows[:seen].copy_(progress.rows.new_tensor(saved["rows"]))
        progress.losses = progress.losses[-self.window :]
        return progress


ACTIVE: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Recover]] = weakref.WeakKeyDictionary()
"""The `Recover` of each optimizer."""


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a method. The hook does not keep the object of the method alive.

    torch.compile does not trace the hook.
    """
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args)

    return torch.compiler.disable(hook)  # type: ignore[no-any-return, unused-ignore]
