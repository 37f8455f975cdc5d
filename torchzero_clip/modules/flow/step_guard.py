"""What the guards share: one flag on the device, and how often it was set."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Transform, Units, UnitState, keep_number
from torchzero_clip.core.norms import NAMED
from torchzero_clip.core.sharding.collectives import gather
from torchzero_clip.core.torch_private import assert_async

NONFINITE, LARGE, SPIKE, LOSS = 1, 2, 3, 4  # why a step is skipped; 0 where it happens


class _Seen(NamedTuple):
    """What a guard judges, equal on all ranks: vectors of one entry, or None for no loss."""

    norm: Tensor
    loss: Tensor | None = None
    told: Tensor | None = None


class _StepGuard(Transform):
    """A guard stands first, and judges a step by the norm of all gradients, and its loss.

    Write `judge`, and for a guard with memory `init_unit` and `remember`.
    """

    place = "first"
    leaves = "gradient"
    judges_loss = False
    reason = "bad gradients"

    def init_unit(self) -> dict[str, Any]:
        return {"skipped": 0.0, "consecutive": 0.0, "since": math.inf}

    def judge(self, seen: _Seen, state: UnitState, group: Group) -> Tensor:
        """Why the step is skipped, as a number; 0 where it happens."""
        raise NotImplementedError(f"{type(self).__name__} has no judge")

    def remember(self, seen: _Seen, bad: Tensor, state: UnitState) -> UnitState:
        """The state after the step, beside the counts."""
        return {}

    def per_group(self) -> dict[str, Any]:
        return self.init_unit()

    def units(self, buckets: list[Bucket]) -> Units:
        """All gradients as one unit."""
        return Units(buckets, "global", NAMED["l2"], name=type(self).__name__)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        self.units(buckets).load(self.init_unit())
        return buckets

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units, step = self.units(buckets), buckets[0].step
        seen, before = self.seen(units), units.load(self.init_unit())
        why = self.judge(seen, before, buckets[0].group)
        if step.skip:  # a guard before this one has skipped it
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
        """The norm and the loss: the largest norm of all ranks, and the mean of their losses."""
        norm, given = units.norm(), units.buckets[0].step.loss if self.judges_loss else None
        if given is None and self._alone(units):
            return _Seen(norm)
        zero, told = torch.zeros_like(norm), torch.full_like(norm, given is not None)
        loss = zero if given is None else torch.as_tensor(given, device=units.home).to(norm).view(1)
        if self._alone(units):
            return _Seen(norm, loss, told > 0)
        norms, losses, ranks = gather(torch.cat([norm, loss, told]), None).unbind(1)
        return _Seen(norms.amax(0, True), losses.sum(0, True) / ranks.sum(), ranks.sum(0, True) > 0)

    def _alone(self, units: Units) -> bool:
        """Whether other ranks know no more: all have joined in the norm, or there is one rank."""
        step = units.buckets[0].step
        world, group = step.world_size, step.process_group
        if world == 1:
            return True
        if group is not None:
            joined = {torch.distributed.get_world_size(group)}
        else:  # gradients that are whole might differ in their last bits
            layouts = [layout for bucket in units.buckets for layout in bucket.cohort.layouts]
            joined = {x.mesh.size() if x is not None and x.split else 0 for x in layouts}
        return joined == {world} and not self.judges_loss

    def _counts(self, state: UnitState, bad: Tensor) -> UnitState:
        """The counts after the step. A row that is too long stays until the host has seen it."""
        row, most = state["consecutive"], getattr(self, "max_consecutive", None)
        again, since = (row + 1) * bad, torch.where(bad, 0.0, state["since"] + 1)
        if most is not None:
            again = torch.where((row >= most) & ~bad, row, again)
        return {"skipped": state["skipped"] + bad, "consecutive": again, "since": since}

    def _give_up(self, units: Units, row: Tensor) -> None:
        """Raise after a row that is too long. The host looks once in as many steps."""
        most: int | None = getattr(self, "max_consecutive", None)
        if most is None:
            return
        words = f"{type(self).__name__}: {{}} steps in a row had {self.reason}"
        if torch.compiler.is_compiling():
            assert_async(row[0] < most, words.format(most))
            return
        bucket = units.buckets[0]
        since = int(bucket.group_state.get(f"{bucket.bound.path}/unseen", 0)) + 1
        keep_number([bucket], "unseen", since % most)
        if since >= most and (count := int(row.item())) >= most:
            units.store({"consecutive": torch.zeros_like(row)})
            raise RuntimeError(words.format(count))
