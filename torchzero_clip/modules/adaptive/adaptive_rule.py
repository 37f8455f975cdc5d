"""AdaptiveRule: what the rules that learn from past norms share."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from torchzero_clip.core import Group, NormRule, Reach, UnitState
from torchzero_clip.modules.adaptive.criterion import Criterion


class AdaptiveRule(NormRule):
    """What the adaptive rules share: a criterion, and another rule during a unit's first norms.

    Write `judge`, the criterion, and `values`, what it reads of the group.
    """

    warmup_steps = 20
    warmup = cast("NormRule | None", None)
    open_fields = ("warmup", "warmup_steps")

    @property
    def reach(self) -> Reach:
        total = self.warmup is not None and self.warmup.dim != self.dim and self.warmup_steps > 0
        return "model" if total else super().reach

    def judge(self) -> Criterion:
        """The criterion."""
        raise NotImplementedError(f"{type(self).__name__} has no judge")

    def values(self, group: Group) -> Group:
        """The criterion's live values."""
        return group

    def init_unit(self) -> dict[str, Any]:
        warm = {"count": 0.0, "warmup_mean": 0.0, "warmup_spread": 0.0}
        return {**warm, **self.judge().init_unit()}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        warming = state["count"] < self.warmup_steps
        limit = self.judge().limit(norm, state, self.values(group))
        return torch.where(warming, self.warm_limit(norm, group), limit)

    def warm_limit(self, norm: Tensor, group: Group) -> Tensor:
        """The limit of units that still warm up."""
        if self.warmup is None:
            return torch.full_like(norm, torch.inf)
        inner = group[self.warmup.name or type(self.warmup).__name__]
        if self.warmup.dim == self.dim:
            return torch.zeros_like(norm) + self.warmup.limit(norm, {}, inner)
        total = self.total(group)
        return norm / (total / self.warmup.limit(total, {}, inner)).clamp(min=1)

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        count, mean, spread = state["count"] + 1, state["warmup_mean"], state["warmup_spread"]
        warming = state["count"] < self.warmup_steps
        first = count == max(self.warmup_steps, 1)
        new_mean = mean + (norm - mean) / count
        squares = spread**2 + (norm - mean) * (norm - new_mean)
        judge, values = self.judge(), self.values(group)
        seen = torch.where(warming, norm, self.seen(norm, clipped, state, values))
        after = judge.observe(seen, state, values)
        begin = judge.start(new_mean, squares / (count - 1).clamp(min=1), max(self.warmup_steps, 1))
        for key, value in begin.items():
            after[key] = torch.where(first, value, after[key])
        return {
            **after,
            "count": count,
            "warmup_mean": torch.where(warming, new_mean, mean),
            "warmup_spread": torch.where(warming, squares.sqrt(), spread),
        }

    def seen(self, norm: Tensor, clipped: Tensor, state: UnitState, values: Group) -> Tensor:
        """The norm that the criterion observes."""
        return norm if self.judge().observes == "raw" else clipped

    def check(self) -> None:
        super().check()
        if self.warmup is not None:
            self._check_warmup(self.warmup)
        self.require("warmup_steps", at_least=self.judge().least_warmup, integer=True)

    def _check_warmup(self, rule: Any) -> None:
        if (
            not isinstance(rule, NormRule)
            or rule.sets_norm
            or rule.init_unit()
            or rule.ord != 2
            or rule.dim not in (self.dim, "global")
        ):
            raise ValueError(
                f"{type(self).__name__}: warmup must be None or a rule without memory that clips "
                f"the 2-norm, such as ClipNorm, with dim='global' or dim={self.dim!r}, got {rule!r}"
            )
