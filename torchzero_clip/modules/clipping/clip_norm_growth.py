"""ClipNormGrowth: a rule that limits how fast the norm grows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import AtLeastOne, Threshold


class ClipNormGrowth(NormRule):
    """Norm clipping without a threshold: limits how much the norm may grow per step.

    Use it against short spikes. If the norm jumps to a higher level and stays there, the limit
    reaches the new level in log(jump) / log(mul) steps, where `jump` is the ratio of the two
    levels.

    u ← u · min(1, L / ‖u‖),   L = min(p + add, max(p, min_value) · mul);
    p ← max(‖u‖, p / max_decay)

    Here p is the norm of the previous step, measured after clipping. `max_decay` limits how fast p
    falls. There is no limit before the first norm above zero.

    Args:
        add: The largest increase of the norm per step, as a difference. Default: None, no limit.
        mul: The largest increase of the norm per step, as a factor. Default: 1.5.
        min_value: If p is smaller than `min_value`, `mul` multiplies `min_value` instead of p.
            Default: 1e-4.
        max_decay: The largest factor by which p falls per step, or None for no bound.
            Default: 2.0.
        ord: The norm to measure, as in `ClipNorm`. Default: 2.
        parameterwise: If False, all tensors share one norm, as with `dim="global"`. Default: True.
        dim: The tensors that share one norm: None for a separate norm per tensor, or "layer",
            "group" or "global". Slices are not supported. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNormGrowth, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNormGrowth(dim="global"), Adam(), LR(1e-3))
    """

    add: Live[Threshold | None] = None
    mul: Live[AtLeastOne | None] = 1.5
    min_value: Live[Threshold | None] = 1e-4
    max_decay: Live[AtLeastOne | None] = 2.0
    ord: Ord = 2
    parameterwise: bool = True
    dim: Scope = None

    pure = True

    def check(self) -> None:
        super().check()
        check_growth(self)
        if not self.parameterwise and self.dim is not None:
            raise ValueError(
                f"{type(self).__name__}: parameterwise=False means dim='global' and cannot be "
                f"combined with dim={self.dim!r}: pass only one of these two arguments"
            )

    @property
    def scope(self) -> Scope:
        return self.dim if self.parameterwise else "global"

    def init_unit(self) -> dict[str, Any]:
        return {"previous": math.inf}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        previous = state["previous"]
        bound = torch.full_like(previous, math.inf)
        if group["add"] is not None:
            bound = previous + group["add"]
        if group["mul"] is not None:
            floor = 0 if group["min_value"] is None else group["min_value"]
            bound = torch.minimum(bound, previous.clamp(min=floor) * group["mul"])
        return bound

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        previous = state["previous"]
        decay = math.inf if group["max_decay"] is None else group["max_decay"]
        after = torch.maximum(clipped.to(previous.dtype), previous / decay)
        first = torch.where(clipped > 0, clipped.to(previous.dtype), previous)
        return {"previous": torch.where(torch.isinf(previous), first, after)}


def check_growth(rule: Any) -> None:
    """Raise ValueError if a rule has neither `add` nor `mul`. Such a rule would have no limit."""
    if rule.add is None and rule.mul is None:
        raise ValueError(f"{type(rule).__name__}: pass add= or mul=, got None for both")
