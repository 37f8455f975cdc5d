"""ClipNormByEMA: the norm of a moving average is the limit."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, NormRule, Ord, Scope, UnitState, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Share


class ClipNormByEMA(NormRule):
    """m ← β m + (1 - β) u;   u ← u · min(1, max(‖m‖, eps) / ‖u‖)

    Since the average starts at zero the first steps are short: step t may have about 1 - βᵗ of the
    usual norm. Once a norm of m other than zero has been seen it may grow by max_ema_growth a step,
    and m shrinks with it. A unit with a NaN or an infinity leaves its average as it was.

    Args:
        beta: How much of the average is kept a step.
        ord: Which norm.
        eps: The smallest limit.
        tensorwise: False for one norm of all tensors, the same as dim="global".
        max_ema_growth: The factor that ‖m‖ may grow by a step, or None.
        ema_init: Start the average at "zeros" or at the first "update" of the unit.
        dim: What is measured together, as in `ClipNorm`, without slices.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNormByEMA, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNormByEMA(0.9), Adam(), LR(1e-3))
    """

    beta: Live[Share] = 0.99
    ord: Ord = 2
    eps: Live[NonNegative] = 1e-6
    tensorwise: bool = True
    max_ema_growth: Live[AtLeastOne | None] = 1.5
    ema_init: Literal["zeros", "update"] = "zeros"
    dim: Scope = None

    pure = True

    def check(self) -> None:
        super().check()
        if not self.tensorwise and self.dim is not None:
            raise ValueError(
                f"{type(self).__name__}: tensorwise=False means dim='global'; give one of the two, "
                f"got dim={self.dim!r} as well"
            )

    @property
    def scope(self) -> Scope:
        return self.dim if self.tensorwise else "global"

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"ema": zeros_like_state(param)}

    def init_unit(self) -> dict[str, Any]:
        return {"ema_norm": 0.0, "started": 0.0}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        norm, state = units.norm(), units.load(self.init_unit())
        seen = units.finite(norm)
        weights = self._weights(state, units.each("beta"))
        units.lerp_("ema", weights, where=seen)  # m ← β m + (1 - β) u, in units without NaN
        size = units.norm("ema")
        bounds = self._bounds(state["ema_norm"], units.each("max_ema_growth"))
        grown = torch.minimum(size, units.of_first_group(bounds))
        units.div_("ema", torch.where(grown < size, units.ratio(size, grown), 1.0))  # m ≤ bound
        self.scale(units, norm, [grown.clamp(min=eps) for eps in units.each("eps")])
        last = torch.where(seen & (grown > 0), grown, state["ema_norm"])
        started = torch.maximum(state["started"], seen.to(norm.dtype))
        units.store({"ema_norm": last, "started": started})
        return buckets

    def _weights(self, state: UnitState, betas: list[Any]) -> list[Tensor]:
        """How much of the update each unit takes in, for the β of every group."""
        started = state["started"]
        first = (started == 0) & (self.ema_init == "update")
        weights = [torch.zeros_like(started) + (1 - beta) for beta in betas]
        return [torch.where(first, 1.0, weight) for weight in weights]

    def _bounds(self, before: Tensor, growths: list[Any]) -> list[Tensor]:
        """The largest ‖m‖ for the growth of every group: any, before it was above zero."""
        bounds = [before * (math.inf if growth is None else growth) for growth in growths]
        return [torch.where(before > 0, bound, math.inf) for bound in bounds]
