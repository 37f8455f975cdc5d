"""The base class of guards. A guard computes a flag on the device that skips the step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Transform, Units, UnitState, keep_number
from torchzero_clip.core.norms import NAMED
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.collectives import gather
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.core.torch_private import assert_async

# the reasons to skip a step, as numbers on the device; 0 says that the step is done
NONFINITE = 1
LARGE = 2
SPIKE = 3
LOSS = 4


class _Seen(NamedTuple):
    """The values that a guard checks. Each is a vector with one element, and equal on all ranks.

    Attributes:
        norm: The global gradient norm.
        loss: The loss, or None if the guard does not check the loss.
        has_loss: Whether any rank has reported a loss, or None if the guard does not check the
            loss.
    """

    norm: Tensor
    loss: Tensor | None = None
    has_loss: Tensor | None = None


class _StepGuard(Transform):
    """The base class of guards. A guard checks the global gradient norm and the loss of a step.

    A guard is the first link of a chain. A subclass defines `judge`. A guard that stores past
    values also defines `init_unit` and `remember`.
    """

    place = "first"
    leaves = "gradient"
    judges_loss = False
    reason = "bad gradients"

    def init_unit(self) -> dict[str, Any]:
        return {"skipped": 0.0, "consecutive": 0.0, "since": math.inf}

    def judge(self, seen: _Seen, state: UnitState, group: Group) -> Tensor:
        """Return 0 to do the step, or a constant above 0: the reason to skip the step."""
        raise NotImplementedError(f"{type(self).__name__} must define judge")

    def remember(self, seen: _Seen, bad: Tensor, state: UnitState) -> UnitState:
        """Return the new state after the step, except for the counts."""
        return {}

    def per_group(self) -> dict[str, Any]:
        return self.init_unit()

    def units(self, buckets: list[Bucket]) -> Units:
        """Return all gradients as one unit."""
        return Units(buckets, "global", NAMED["l2"], name=type(self).__name__)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        self.units(buckets).load(self.init_unit())
        return buckets

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        step = buckets[0].step
        units = self.units(buckets)
        seen = self.seen(units)
        before = units.load(self.init_unit())
        why = self.judge(seen, before, buckets[0].group)
        if step.skip:  # a guard before this one may have skipped the step
            why = torch.where(step.skip.on(units.home), 0, why)
        bad = why > 0
        state = {**before, **self._counts(before, bad)}
        state |= self.remember(seen, bad, state)
        units.store(state)
        counts = {name: state[name][0].float() for name in ("skipped", "consecutive")}
        step.record[buckets[0].bound.path] = {**counts, "why": why[0].float()}
        self._give_up(units, state["consecutive"])
        step.skip.add(bad[0])
        return buckets

    def seen(self, units: Units) -> _Seen:
        """Return the largest norm of all ranks and the mean of their losses."""
        norm = units.norm()
        reported = units.buckets[0].step.loss if self.judges_loss else None
        alone = self._alone(units)
        if reported is None and alone:
            return _Seen(norm)
        if reported is None:
            loss = torch.zeros_like(norm)
        elif isinstance(reported, Tensor):
            loss = reported.to(units.home).to(norm).view(1)
        else:  # filled on the device, because a copy from the host would synchronize
            loss = norm.new_full((1,), reported, dtype=wide(units.home)).to(norm)
        has_loss = torch.full_like(norm, reported is not None)
        if alone:
            return _Seen(norm, loss, has_loss > 0)
        norms, losses, ranks = gather(torch.cat([norm, loss, has_loss]), None).unbind(1)
        mean_loss = losses.sum(0, True) / ranks.sum()
        return _Seen(norms.amax(0, True), mean_loss, ranks.sum(0, True) > 0)

    def _alone(self, units: Units) -> bool:
        """Return whether this rank has all values, so that no communication is needed."""
        step = units.buckets[0].step
        if step.world_size == 1:
            return True
        if self.judges_loss:
            return False
        if step.process_group is not None:
            return torch.distributed.get_world_size(step.process_group) == step.world_size
        # norms of replicas may differ: in their last bits, or if only one replica has NaN
        layouts = [layout for bucket in units.buckets for layout in bucket.cohort.layouts]
        shard_counts = {0 if layout is None else layout.shard_count for layout in layouts}
        return shard_counts == {step.world_size}

    def _counts(self, state: UnitState, bad: Tensor) -> UnitState:
        """Return the counts after the step.

        If too many steps in a row were skipped, the count does not fall until the host has read it.
        """
        before = state["consecutive"]
        most: int | None = getattr(self, "max_consecutive", None)
        consecutive = torch.where(bad, before + 1, 0.0)
        if most is not None:
            consecutive = torch.where((before >= most) & ~bad, before, consecutive)
        return {
            "skipped": state["skipped"] + bad,
            "consecutive": consecutive,
            "since": torch.where(bad, 0.0, state["since"] + 1),
        }

    def _give_up(self, units: Units, consecutive: Tensor) -> None:
        """Raise RuntimeError after too many skipped steps in a row.

        The host reads the count only rarely, to avoid synchronization.
        """
        most: int | None = getattr(self, "max_consecutive", None)
        if most is None:
            return
        message = f"{type(self).__name__}: skipped {{}} in a row because of {self.reason}"
        if torch.compiler.is_compiling():
            assert_async(consecutive[0] < most, message.format(counted(most, "step")))
            return
        bucket = units.buckets[0]
        unread_steps = int(bucket.group_state.get(f"{bucket.bound.path}/unseen", 0)) + 1
        keep_number([bucket], "unseen", unread_steps % most)
        if unread_steps >= most and (count := int(consecutive.item())) >= most:
            units.store({"consecutive": torch.zeros_like(consecutive)})
            raise RuntimeError(message.format(counted(count, "step")))
