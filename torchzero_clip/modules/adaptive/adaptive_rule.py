"""AdaptiveRule: the base class of rules that compute a limit from past norms."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from torchzero_clip.core import Group, NormRule, Reach, UnitState
from torchzero_clip.core.norm_rule import has_own_step
from torchzero_clip.modules.adaptive.criterion import Criterion


class AdaptiveRule(NormRule):
    """The base class of norm rules that use a criterion. Another rule may clip during the warm-up.

    A subclass defines `judge`, which returns the criterion. A subclass may also define `values`,
    which returns the hyperparameters that the criterion reads.
    """

    warmup_steps = 20
    warmup = cast("NormRule | None", None)
    open_fields = ("warmup", "warmup_steps")

    @property
    def reach(self) -> Reach:
        if self.warmup is not None and self.warmup.dim != self.dim and self.warmup_steps > 0:
            return "model"  # the warm-up rule measures the global norm
        return super().reach

    def judge(self) -> Criterion:
        """Return the criterion that computes the limit."""
        raise NotImplementedError(f"{type(self).__name__} must define judge")

    def values(self, group: Group) -> Group:
        """Return the live hyperparameters of the criterion."""
        return group

    def init_unit(self) -> dict[str, Any]:
        warmup_state = {"count": 0.0, "warmup_mean": 0.0, "warmup_spread": 0.0}
        return {**warmup_state, **self.judge().init_unit()}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        warming = state["count"] < self.warmup_steps
        limit = self.judge().limit(norm, state, self.values(group))
        return torch.where(warming, self.warm_limit(norm, group), limit)

    def warm_limit(self, norm: Tensor, group: Group) -> Tensor:
        """Return the limit for each unit (such as a tensor) that is still in the warm-up."""
        if self.warmup is None:
            return torch.full_like(norm, torch.inf)
        inner = group[self.warmup.name or type(self.warmup).__name__]
        if self.warmup.dim == self.dim:
            return torch.zeros_like(norm) + self.warmup.limit(norm, {}, inner)
        total = self.total(group)
        return norm / (total / self.warmup.limit(total, {}, inner)).clamp(min=1)

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        count = state["count"] + 1
        mean = state["warmup_mean"]
        spread = state["warmup_spread"]
        warming = state["count"] < self.warmup_steps
        warmup_ends = count == max(self.warmup_steps, 1)
        new_mean = mean + (norm - mean) / count
        squares = spread**2 + (norm - mean) * (norm - new_mean)
        criterion = self.judge()
        values = self.values(group)
        observed = torch.where(warming, norm, self.seen(norm, clipped, state, values))
        after = criterion.observe(observed, state, values)
        variance = squares / (count - 1).clamp(min=1)
        start = criterion.start(new_mean, variance, max(self.warmup_steps, 1))
        for key, value in start.items():
            after[key] = torch.where(warmup_ends, value, after[key])
        return {
            **after,
            "count": count,
            "warmup_mean": torch.where(warming, new_mean, mean),
            "warmup_spread": torch.where(warming, squares.sqrt(), spread),
        }

    def seen(self, norm: Tensor, clipped: Tensor, state: UnitState, values: Group) -> Tensor:
        """Return the norm that the criterion observes."""
        return norm if self.judge().observes == "raw" else clipped

    def check(self) -> None:
        super().check()
        if self.warmup is not None:
            self._check_warmup(self.warmup)
        self.require("warmup_steps", at_least=self.judge().least_warmup, integer=True)

    def _check_warmup(self, rule: Any) -> None:
        """Raise ValueError unless the warm-up rule clips the 2-norm and has no state."""
        if (
            not isinstance(rule, NormRule)
            or rule.sets_norm
            or rule.init_unit()
            or rule.ord != 2
            or has_own_step(rule)
            or rule.dim not in (self.dim, "global")
        ):
            raise ValueError(
                f"{type(self).__name__}: warmup must be None or a transform that clips the 2-norm "
                "and keeps no state, such as ClipNorm, with dim='global' or "
                f"dim={self.dim!r}, got {rule!r}"
            )
