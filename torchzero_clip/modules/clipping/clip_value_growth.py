"""ClipValueGrowth: a rule that limits how fast every element grows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, Threshold
from torchzero_clip.modules.clipping.clip_norm_growth import check_growth


class ClipValueGrowth(Transform):
    """Value clipping without a threshold: limits how much each magnitude may grow per step.

    This rule is like `ClipNormGrowth`, but for single elements. Use it if single elements spike.

    u ← sign(u) · min(|u|, L),   L = min(p + add, max(p, min_value) · mul);
    p ← max(|u|, p / max_decay)

    Here p is the magnitude in the previous step, measured after clipping. `max_decay` limits how
    fast p falls. An element has no limit before its first nonzero value. If an element is NaN or
    infinite, the p of this element does not change.

    Args:
        add: The largest increase of a magnitude per step, as a difference. Default: None, no limit.
        mul: The largest increase of a magnitude per step, as a factor. Default: 1.5.
        min_value: If p is smaller than `min_value`, `mul` multiplies `min_value` instead of p.
            Default: 1e-4.
        max_decay: The largest factor by which p falls per step, or None for no bound.
            Default: 2.0.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ClipValueGrowth, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipValueGrowth(), Momentum(0.9), LR(1e-2))
    """

    add: Live[Threshold | None] = None
    mul: Live[AtLeastOne | None] = 1.5
    min_value: Live[Threshold | None] = 1e-4
    max_decay: Live[AtLeastOne | None] = 2.0

    complex = "refuse"
    per_entry = True
    pure = True

    def check(self) -> None:
        super().check()
        check_growth(self)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"previous": torch.full_like(zeros_like_state(param), math.inf)}

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        previous = state["previous"]
        finite = u.isfinite()
        bound = self._bound(previous, group)
        clipped = u.minimum_(bound).maximum_(bound.neg())
        size = clipped.abs()
        decay = math.inf if group["max_decay"] is None else group["max_decay"]
        after = previous.div(decay).maximum(size)
        first = size.where(size.positive(), previous)
        after = first.where(previous.isinf(), after)
        previous.copy_(after.where(finite, previous))
        return clipped

    def _bound(self, previous: TensorList, group: Group) -> TensorList:
        """Return the largest magnitude that each element may have in this step."""
        if group["mul"] is None:
            return previous.add(group["add"])
        floor = 0 if group["min_value"] is None else group["min_value"]
        bound = previous.maximum(floor).mul_(group["mul"])
        return bound if group["add"] is None else bound.minimum_(previous.add(group["add"]))
