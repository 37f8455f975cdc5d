"""EMARatio: a limit as a multiple of the average."""

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
    """q = n / μ;   if q > r the limit is μ · (1 + f),  f = clipping(q - 1, r - 1);   μ ← α μ + (1 - α) x

    Raw norms are observed, unless told otherwise: a spike of J times the average adds (1 - α) J of
    it, which is forgotten by a factor α a step.

    Args:
        alpha: How much of the average is kept a step.
        r_thresh: r, from which multiple of the average on a norm is a spike.
        clipping: "max" cuts to μ r, "mean" to μ, "reciprocal" between; or a function.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AdaptiveClip, EMARatio, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = AdaptiveClip(EMARatio(r_thresh=1.5), warmup=None)
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """  # noqa: E501

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
        mean, r = state["mean"], group["r_thresh"]
        q = norm / mean
        limit = mean * (1 + clipping_function(self.clipping)(q - 1, r - 1))
        usual = at_most(norm, mean * r)
        limit = torch.where(usual, torch.full_like(limit, torch.inf), limit)
        return none_yet(limit, mean)

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        return {"mean": blend(state["mean"], norm, group["alpha"])}
