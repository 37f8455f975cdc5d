"""DAdaptAdam: Adam whose learning rate is a lower bound of how far away the solution is."""

from __future__ import annotations

import math

from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Positive, Share
from torchzero_clip.modules.descent import distance


class DAdaptAdam(Transform):
    """u ← m / (√v + eps);   m and v average lr d u and u²;   d ← max(d, r / (1 - √β₂) / ‖s‖₁)

    s and r average lr d u and lr d ⟨u, s / (√v + eps)⟩ with √β₂, over the whole model. d is one
    number, a lower bound of how far away the solution is; nothing is left to tune. The link has
    the learning rate, in place of `LR`. It is Adam with D-Adaptation (tested against
    facebookresearch/dadaptation).

    Args:
        lr: Times d.
        betas: How much of m and v is kept a step; of s and r it is √β₂.
        eps: Added to the denominators.
        weight_decay: How much of the parameter joins the update, times lr d.
        decouple: False has it join the gradient.
        use_bias_correction: Correct m and v for their start at zero, as Adam does.
        d0: The first d.
        growth_rate: The most that d is multiplied by in a step.
        layer_scale: Times the steps of a group, and its share in d.

    Example:
        >>> import torch
        >>> from torchzero_clip import DAdaptAdam, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), DAdaptAdam())

    Reference:
        Defazio, Mishchenko, "Learning-rate-free learning by D-adaptation", arXiv 2301.07733.
    """

    lr: Live[NonNegative] = 1.0
    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[Positive] = 1e-8
    weight_decay: Live[NonNegative] = 0.0
    decouple: bool = True
    use_bias_correction: bool = False
    d0: Positive = 1e-6
    growth_rate: Live[AtLeastOne] = math.inf
    layer_scale: Live[NonNegative] = 1.0

    complex = "refuse"
    state_kinds = {"exp_avg": "linear"}
    leaves = "own"
    shown = ("d",)
    per_entry = pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {name: zeros_like_state(param) for name in distance.AVERAGES}

    def init_model(self) -> dict[str, float]:
        return {"d": self.d0, "numerator": 0.0, "step": 0.0}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units, numbers = distance.begin(buckets)
        d, numerator = [numbers.model[name] for name in ("d", "numerator")]
        lr, on, correction = distance.rates(units, numbers, self.use_bias_correction)
        rate, scale = d * lr * correction, distance.vector(units.each("layer_scale"), d)
        betas, live = distance.betas(units, d), distance.of_model(units)
        first, second, third = [on * (1 - beta) for beta in (*betas, betas[1].sqrt())]
        gain = distance.total(units, _gain, rate=scale * rate)
        counted = on * scale
        size = distance.size(units, keep=(1 - third) * counted, take=rate * third * counted)
        share = live["betas"][1] ** 0.5
        numerator = share * numerator + (1 - share) * gain
        found = numerator / ((1 - share) * size)
        grown = d.maximum(found.minimum(d * live["growth_rate"]))
        distance.keep(numbers, size > 0, d=grown, numerator=numerator)
        decay = rate * distance.vector(units.each("weight_decay"), d)
        vectors = {"m": (1 - first, scale * rate * first), "s": (1 - third, rate * third)}
        return distance.move(self, units, decay=decay, rate=(size > 0) * on, v=second, **vectors)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = distance.decayed(u, group, self.decouple)
        return distance.adam(u, state, group, self.decouple)


def _gain(u: TensorList, state: State, group: Group) -> TensorList:
    """What each entry adds to r: the way of the averages so far, along u."""
    over = state["exp_avg_sq"].sqrt().add_(group["eps"]).div_(state["s"])
    return over.reciprocal_().mul_(group["rate"]).mul_(u)
