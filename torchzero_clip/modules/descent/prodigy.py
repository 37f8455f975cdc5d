"""Prodigy: Adam that estimates its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Positive, Share
from torchzero_clip.modules.descent import distance


class Prodigy(Transform):
    """Prodigy: Adam that estimates its own learning rate from the distance to the solution.

    Use it with `LR(1.0)` if you don't want to tune the learning rate. The chain of `Prodigy` and
    `LR` is the official Prodigy (tested against konstmish/prodigy).

    u ← d m / (√v + d eps);   m and v average d u and (d u)²;   d ← max(d, d_coef · r / ‖s‖₁)

    Here d is one number for the whole model. It estimates the distance from the first weights w₀ to
    the solution. The sums s ← β₃ s + lr d² u and r ← β₃ r + lr d² ⟨u, w₀ - w⟩ cover the whole
    model.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.999).
        beta3: The decay rate of s and r. Default: None, √β₂.
        eps: A small number that is added to the denominator, times d. Default: 1e-8.
        weight_decay: The factor of the weight decay: `weight_decay` · d w is added to the update.
            Default: 0.0.
        decouple: If False, the weight decay is added to the gradient (L2 regularization) instead of
            the update. Default: True.
        use_bias_correction: If True, apply bias correction to m and v, as `Adam` does.
            Default: False.
        safeguard_warmup: If True, lr is left out of the sum s, so that a warm-up of lr does not
            make d too large. Default: False.
        d0: The first value of d. Default: 1e-6.
        d_coef: A factor that multiplies the estimate. Change it if steps are too short or too long.
            Default: 1.0.
        growth_rate: The largest factor by which d grows per step. Default: math.inf.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Prodigy
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Prodigy(), LR(1.0))

    Reference:
        Mishchenko, Defazio, "Prodigy: an expeditiously adaptive parameter-free learner",
        arXiv 2306.06101.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    beta3: Live[Share | None] = None
    eps: Live[Positive] = 1e-8
    weight_decay: Live[NonNegative] = 0.0
    decouple: bool = True
    use_bias_correction: bool = False
    safeguard_warmup: bool = False
    d0: Positive = 1e-6
    d_coef: Live[Positive] = 1.0
    growth_rate: Live[AtLeastOne] = math.inf

    reads = ("lr",)
    complex = "refuse"
    leaves = "own"
    shown = ("d",)
    state_kinds = {"start": "weights", "exp_avg": "linear"}
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        state = {name: zeros_like_state(param) for name in (*distance.AVERAGES, "start")}
        state["start"].copy_(param.detach())
        return state

    def init_model(self) -> dict[str, float]:
        return {"d": self.d0, "d_max": self.d0, "numerator": 0.0, "step": 0.0}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units, numbers = distance.begin(buckets)
        d, largest, numerator = [numbers.model[name] for name in ("d", "d_max", "numerator")]
        lr, on, correction = distance.rates(units, numbers, self.use_bias_correction)
        betas = distance.betas(units, d)
        live = distance.of_model(units)
        first, second = [on * (1 - beta) for beta in betas]
        third = distance.vector([_beta3(members[0].group) for members in units.groups], d) ** on
        rate = lr * correction
        growth = d / self.d0
        share = (on if self.safeguard_warmup else rate) * growth
        gain = distance.total(units, _gain, rate=rate * d * growth)
        size = distance.size(units, keep=third * on, take=share * d)
        numerator = _beta3(live) * numerator + gain
        estimate = live["d_coef"] * numerator / size
        largest = largest.maximum(estimate)
        limit = torch.where(d == self.d0, d.maximum(estimate), d) * live["growth_rate"]
        new_d = largest.minimum(limit)
        distance.keep(numbers, size > 0, d=new_d, d_max=largest, numerator=numerator)
        kept_d = numbers.model["d"]
        # with β₁ = 0 there is no average of earlier steps, and u is scaled by the new d
        ahead = torch.where(first < 1, 1.0, kept_d / d)
        eps = kept_d * distance.vector(units.each("eps"), d)
        decay = distance.vector(units.each("weight_decay"), d) / ahead
        rate = torch.where(size > 0, d * correction * ahead, 0.0)
        m = (1 - first, first)
        s = (third, share)
        return distance.move(self, units, eps=eps, decay=decay, rate=rate, m=m, v=second, s=s)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = distance.decayed(u, group, self.decouple).mul_(group["d"])
        return distance.adam(u, state, group, self.decouple)


def _gain(u: TensorList, state: State, group: Group) -> TensorList:
    """Return, for each element, the term that is added to r: (first weight - weight) times u."""
    return state["start"].sub(group["params"]).mul_(group["rate"]).mul_(u)


def _beta3(group: Group) -> Any:
    """Return the share of s and r that is kept per step."""
    return group["betas"][1] ** 0.5 if group["beta3"] is None else group["beta3"]
