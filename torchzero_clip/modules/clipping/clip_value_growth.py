"""ClipValueGrowth: every entry may grow by so much a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, NonNegative
from torchzero_clip.modules.clipping.clip_norm_growth import check_growth


class ClipValueGrowth(Transform):
    """u ← sign(u) · min(|u|, L),   L = min(p + add, max(p, min_value) · mul);   p ← max(|u|, p / max_decay)

    `ClipNormGrowth` for every entry by itself. An entry that is NaN or infinite leaves its memory as
    it was.

    Args:
        add: What a magnitude may grow by a step, added.
        mul: What a magnitude may grow by a step, as a factor.
        min_value: The factor counts from here when the last magnitude was smaller.
        max_decay: The memory falls at most by this factor a step; None for no such bound.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ClipValueGrowth, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipValueGrowth(), Momentum(0.9), LR(1e-2))
    """  # noqa: E501

    add: Live[NonNegative | None] = None
    mul: Live[AtLeastOne | None] = 1.5
    min_value: Live[NonNegative | None] = 1e-4
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
        previous, finite = state["previous"], u.isfinite()
        out = u.minimum_(bound := self._bound(previous, group)).maximum_(bound.neg())
        size = out.abs()
        decay = math.inf if group["max_decay"] is None else group["max_decay"]
        after = previous.div(decay).maximum(size)
        first = size.where(size.positive(), previous)
        after = first.where(previous.isinf(), after)
        previous.copy_(after.where(finite, previous))
        return out

    def _bound(self, previous: TensorList, group: Group) -> TensorList:
        if group["mul"] is None:
            return previous.add(group["add"])
        floor = 0 if group["min_value"] is None else group["min_value"]
        bound = previous.maximum(floor).mul_(group["mul"])
        return bound if group["add"] is None else bound.minimum_(previous.add(group["add"]))
