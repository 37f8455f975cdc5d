"""EMARatio: a criterion whose limit is a multiple of the average norm."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Share, Within
from torchzero_clip.modules.adaptive.criterion import (
    Clipping,
    Criterion,
    at_most,
    blend,
    check_clipping,
    clipping_function,
    none_yet,
)


class EMARatio(Criterion):
    """A multiple of the average norm, as the limit.

    Use it if the norms vary little: a norm above `r_thresh` times the average is a spike.

    q = n / μ;   if q > r the limit is μ · (1 + f),  f = clipping(q - 1, r - 1);
    μ ← α μ + (1 - α) n

    Here n is the norm of the step and μ is the average of past norms. The criterion observes raw
    norms by default. A spike of J times the average raises the average by (1 - α) J times its
    value. The increase then shrinks by the factor α per step.

    Args:
        alpha: The decay rate of the average μ. Default: 0.98.
        r_thresh: r, the multiple of the average above which a norm is a spike. Default: 1.05.
        clipping: The norm of a clipped spike: "max" clips to μ r, "mean" clips to μ, "reciprocal"
            clips to a norm between μ and μ r. A custom function of (q - 1, r - 1) returns f.
            Default: "max".

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, EMARatio, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = AdaptiveClip(EMARatio(r_thresh=1.5), warmup=None)
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """

    alpha: Live[Share] = 0.98
    r_thresh: Live[Annotated[float, Within(above=1)]] = 1.05
    clipping: Clipping = "max"

    pure = True

    def check(self) -> None:
        check_clipping(self)

    def init_unit(self) -> dict[str, Any]:
        return {"mean": 0.0}

    def start(self, mean: Tensor, var: Tensor, count: int) -> UnitState:
        return {"mean": mean}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        mean = state["mean"]
        r = group["r_thresh"]
        q = norm / mean
        limit = mean * (1 + clipping_function(self.clipping)(q - 1, r - 1))
        no_spike = at_most(norm, mean * r)
        limit = torch.where(no_spike, torch.full_like(limit, torch.inf), limit)
        return none_yet(limit, mean)

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        return {"mean": blend(state["mean"], norm, group["alpha"])}
