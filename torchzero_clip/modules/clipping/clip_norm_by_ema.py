"""ClipNormByEMA and NormalizeByEMA: the norm of a moving average is the limit."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, NormRule, Ord, Scope, Units, zeros_like_state


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
        ema_init: Start the average at "zeros" or at the first "update".
        dim: What is measured together, as in `ClipNorm`, without slices.

    Example:
        >>> opt = Modular(model.parameters(), ClipNormByEMA(0.9), Adam(), LR(1e-3))
    """

    beta: Live[float] = 0.99
    ord: Ord = 2
    eps: Live[float] = 1e-6
    tensorwise: bool = True
    max_ema_growth: Live[float | None] = 1.5
    ema_init: Literal["zeros", "update"] = "zeros"
    dim: Scope = None

    def check(self) -> None:
        super().check()
        self.require("beta", at_least=0, below=1)
        self.require("eps", at_least=0)
        self.require("max_ema_growth", at_least=1, optional=True)
        self.require_one_of("ema_init", ("zeros", "update"))
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
        units = Units(self, buckets)
        norm, state = units.measure([bucket.u for bucket in units.buckets]), units.load()
        known = units.known(norm)
        self._average(units, known, state["started"])
        size = units.measure([bucket.state["ema"] for bucket in units.buckets])
        grown = self._grown(units, size, state["ema_norm"])
        limits = [grown.clamp(min=members[0].group["eps"]) for members in units.groups]
        self.scale(units, norm, limits)
        started = torch.maximum(state["started"], known.to(norm.dtype))
        last = torch.where(known & (grown > 0), grown, state["ema_norm"])
        units.store({"ema_norm": last, "started": started})
        return buckets

    def _average(self, units: Units, known: Tensor, started: Tensor) -> None:
        """Take the update into m, except in units that have a NaN or an infinity."""
        for bucket in units.buckets:
            weight = torch.zeros_like(started) + (1 - bucket.group["beta"])
            if self.ema_init == "update":
                weight = torch.where(started > 0, weight, torch.ones_like(weight))
            u, held = bucket.u.to(bucket.state_dtype), bucket.state
            held["ok"], held["w"] = [units.per_tensor(bucket, x) for x in (known, weight)]
            bucket.entrywise(
                lambda u, m: m["ema"].lerp_(u.where(m["ok"], m["ema"]), m["w"]), u, held
            )

    def _grown(self, units: Units, size: Tensor, before: Tensor) -> Tensor:
        """Let ‖m‖ grow by max_ema_growth, and shrink m to that."""
        growths = [members[0].group["max_ema_growth"] for members in units.groups]
        bounds = [before * (math.inf if growth is None else growth) for growth in growths]
        bound = torch.where(before > 0, units.by_owner(bounds), torch.full_like(before, math.inf))
        grown = torch.minimum(size, bound)
        shrink = torch.where(grown < size, units.ratio(size, grown), torch.ones_like(size))
        for bucket in units.buckets:
            bucket.state["ema"].div_(units.spread(bucket, shrink))
        return grown


class NormalizeByEMA(ClipNormByEMA):
    """m ← β m + (1 - β) u;   u ← u · max(‖m‖, eps) / ‖u‖

    `ClipNormByEMA` that scales up as well as down.

    Args:
        beta: How much of the average is kept a step.
        ord: Which norm.
        eps: The smallest norm that the update gets.
        tensorwise: False for one norm of all tensors, the same as dim="global".
        max_ema_growth: The factor that ‖m‖ may grow by a step, or None.
        ema_init: Start the average at "zeros" or at the first "update".
        dim: What is measured together, as in `ClipNorm`, without slices.

    Example:
        >>> opt = Modular(model.parameters(), NormalizeByEMA(0.9), LR(1e-2))
    """

    sets_norm = True
