"""Prodigy: Adam whose learning rate is an estimate of how far away the solution is."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Positive, Share
from torchzero_clip.modules.descent import distance


class Prodigy(Transform):
    """u ← d m / (√v + d eps);   m and v average d u and (d u)²;   d ← max(d, d_coef · r / ‖s‖₁)

    s ← β₃ s + lr d² u and r ← β₃ r + lr d² ⟨u, w₀ - w⟩ are sums over the whole model, w₀ the
    weights that a parameter began with. d is one number, an estimate of how far away the solution
    is; with `LR(1.0)` after the link nothing is left to tune. It is Prodigy (tested against
    konstmish/prodigy).

    Args:
        betas: How much of m and v is kept a step.
        beta3: How much of s and r is; None for √β₂.
        eps: Added to the denominator, times d.
        weight_decay: How much of the parameter joins the update, times d as the rest of it.
        decouple: False has it join the gradient.
        use_bias_correction: Correct m and v for their start at zero, as Adam does.
        safeguard_warmup: Leave lr out of s, so that a warm-up of lr does not make d too large.
        d0: The first d.
        d_coef: How far to trust the estimate: what to change where steps are too short or long.
        growth_rate: The most that d is multiplied by in a step.

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
    per_entry = pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        made = {name: zeros_like_state(param) for name in (*distance.AVERAGES, "start")}
        return {**made, "start": made["start"].copy_(param.detach())}

    def init_model(self) -> dict[str, float]:
        return {"d": self.d0, "d_max": self.d0, "numerator": 0.0, "step": 0.0}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units, numbers = distance.begin(buckets)
        d, most, numerator = [numbers.model[name] for name in ("d", "d_max", "numerator")]
        lr, on, correction = distance.rates(units, numbers, self.use_bias_correction)
        betas, live = distance.betas(units, d), distance.of_model(units)
        first, second = [on * (1 - beta) for beta in betas]
        third = distance.vector([_beta3(members[0].group) for members in units.groups], d) ** on
        rate, growth = lr * correction, d / self.d0
        share = (on if self.safeguard_warmup else rate) * growth
        gain = distance.total(units, _gain, rate=rate * d * growth)
        size = distance.size(units, keep=third * on, take=share * d)
        numerator = _beta3(live) * numerator + gain
        found = live["d_coef"] * numerator / size
        most = most.maximum(found)
        grown = torch.where(d == self.d0, d.maximum(found), d) * live["growth_rate"]
        distance.keep(numbers, size > 0, d=most.minimum(grown), d_max=most, numerator=numerator)
        new = numbers.model["d"]
        ahead = torch.where(first < 1, 1.0, new / d)  # without an average u is at the new d
        eps = new * distance.vector(units.each("eps"), d)
        decay = distance.vector(units.each("weight_decay"), d) / ahead
        rate = (size > 0) * d * correction * ahead
        vectors = {"m": (1 - first, first), "v": second, "s": (third, share)}
        return distance.move(self, units, eps=eps, decay=decay, rate=rate, **vectors)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = distance.decayed(u, group, self.decouple).mul_(group["d"])
        return distance.adam(u, state, group, self.decouple)


def _gain(u: TensorList, state: State, group: Group) -> TensorList:
    """What each entry adds to r: the way from where the weights began, along u."""
    return state["start"].sub(group["params"]).mul_(group["rate"]).mul_(u)


def _beta3(group: Group) -> Any:
    return group["betas"][1] ** 0.5 if group["beta3"] is None else group["beta3"]
