"""ClipNormGrowth: the norm may grow by so much a step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import AtLeastOne, NonNegative


class ClipNormGrowth(NormRule):
    """u ← u · min(1, L / ‖u‖),   L = min(p + add, max(p, min_value) · mul);   p ← max(‖u‖, p / max_decay)

    p is the norm that the last step was allowed. There is no bound until a norm other than zero has
    been seen. After a jump that lasts, the limit reaches the new level in log(jump) / log(mul) steps.

    Args:
        add: What the norm may grow by a step, added.
        mul: What the norm may grow by a step, as a factor.
        min_value: The factor counts from here when the last norm was smaller.
        max_decay: The memory p falls at most by this factor a step; None for no such bound.
        ord: Which norm.
        parameterwise: False for one norm of all tensors, the same as dim="global".
        dim: What is measured together, as in `ClipNorm`, without slices.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNormGrowth, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNormGrowth(dim="global"), Adam(), LR(1e-3))
    """  # noqa: E501

    add: Live[NonNegative | None] = None
    mul: Live[AtLeastOne | None] = 1.5
    min_value: Live[NonNegative | None] = 1e-4
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
                f"{type(self).__name__}: parameterwise=False means dim='global'; give one of the "
                f"two, got dim={self.dim!r} as well"
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
    """Raise a sentence for a rule without a bound."""
    if rule.add is None and rule.mul is None:
        raise ValueError(f"{type(rule).__name__}: give add or mul, got None for both")
