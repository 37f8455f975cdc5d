"""ClipNormByEMA: a rule that limits the norm to the norm of a moving average."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, NormRule, Ord, Scope, UnitState, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Share


class ClipNormByEMA(NormRule):
    """Norm clipping without a threshold: the limit is the norm of a running average of the updates.

    Use it if you don't know a good threshold.

    m ← β m + (1 - β) u;   u ← u · min(1, max(‖m‖, eps) / ‖u‖)

    The average m starts at zero, so the first steps are short. The norm of step t is about 1 - βᵗ
    times the usual norm. Use `ema_init="update"` to avoid short steps. Per step, ‖m‖ grows at most
    by the factor `max_ema_growth`. If ‖m‖ would grow more, the rule scales m down. The first
    increase from zero has no limit. If the update of a tensor contains NaN or infinity, the average
    of this tensor does not change.

    Args:
        beta: The decay rate of the average m. Default: 0.99.
        ord: The norm to measure, as in `ClipNorm`. Default: 2.
        eps: The smallest limit. Default: 1e-6.
        tensorwise: If False, all tensors share one norm, as with `dim="global"`. Default: True.
        max_ema_growth: The largest factor by which ‖m‖ grows per step, or None for no bound.
            Default: 1.5.
        ema_init: The first value of the average: "zeros", or "update" for the first update that the
            rule receives. Default: "zeros".
        dim: The tensors that share one norm: None for a separate norm per tensor, or "layer",
            "group" or "global". Slices are not supported. Default: None.

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
                f"{type(self).__name__}: tensorwise=False means dim='global' and cannot be "
                f"combined with dim={self.dim!r}: pass only one of these two arguments"
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
        norm = units.norm()
        state = units.load(self.init_unit())
        seen = units.finite(norm)
        weights = self._weights(state, units.each("beta"))
        units.lerp_("ema", weights, where=seen)  # m ← β m + (1 - β) u, in units without NaN
        size = units.norm("ema")
        bounds = self._bounds(state["ema_norm"], units.each("max_ema_growth"))
        grown = torch.minimum(size, units.of_first_group(bounds))
        units.div_("ema", torch.where(grown < size, units.ratio(size, grown), 1.0))  # ‖m‖ ≤ bound
        self.scale(units, norm, [grown.clamp(min=eps) for eps in units.each("eps")])
        last = torch.where(seen & (grown > 0), grown, state["ema_norm"])
        started = torch.maximum(state["started"], seen.to(norm.dtype))
        units.store({"ema_norm": last, "started": started})
        return buckets

    def _weights(self, state: UnitState, betas: list[Any]) -> list[Tensor]:
        """Return the weight of the update in the average: for each β, a vector over the units."""
        started = state["started"]
        first = (started == 0) & (self.ema_init == "update")
        weights = [torch.zeros_like(started) + (1 - beta) for beta in betas]
        return [torch.where(first, 1.0, weight) for weight in weights]

    def _bounds(self, before: Tensor, growths: list[Any]) -> list[Tensor]:
        """Return the largest allowed ‖m‖, for each group. As long as ‖m‖ is 0, this is infinity."""
        bounds = [before * (math.inf if growth is None else growth) for growth in growths]
        return [torch.where(before > 0, bound, math.inf) for bound in bounds]
