"""DAdaptAdam: Adam that estimates its learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import AtLeastOne, NonNegative, Positive, Share
from torchzero_clip.modules.descent import distance


class DAdaptAdam(Transform):
    """D-Adaptation: Adam that estimates its own learning rate from the distance to the solution.

    Use it if you don't want to tune the learning rate. `Prodigy` is a newer method by the same
    authors. Put `DAdaptAdam` last, in place of `LR`. It is Adam with D-Adaptation (tested against
    facebookresearch/dadaptation).

    u ← m / (√v + eps);   m and v average lr d u and u²;   d ← max(d, r / (1 - √β₂) / ‖s‖₁)

    Here d is one number for the whole model. It is a lower bound of the distance from the first
    weights to the solution. The vector s is a running average of lr d u. The number r is a running
    average of lr d ⟨u, s / (√v + eps)⟩, with s and v from before the step. Both averages cover the
    whole model, with the decay rate √β₂.

    Args:
        lr: A factor that multiplies the estimated learning rate d. Default: 1.0.
        betas: The decay rates of the averages m and v. The decay rate of s and r is √β₂.
            Default: (0.9, 0.999).
        eps: A small number that is added to the denominators. Default: 1e-8.
        weight_decay: The factor of the weight decay: `weight_decay` · lr d w is added to the
            update. Default: 0.0.
        decouple: If False, the weight decay is added to the gradient (L2 regularization) instead of
            the update. Default: True.
        use_bias_correction: If True, apply bias correction to m and v, as `Adam` does.
            Default: False.
        d0: The first value of d. Default: 1e-6.
        growth_rate: The largest factor by which d grows per step. Default: math.inf.
        layer_scale: A factor for a parameter group. The factor multiplies the steps of the group
            and the contribution of the group to the estimate. Default: 1.0.

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
    per_entry = True
    pure = True

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {name: zeros_like_state(param) for name in distance.AVERAGES}

    def init_model(self) -> dict[str, float]:
        return {"d": self.d0, "numerator": 0.0, "step": 0.0}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units, numbers = distance.begin(buckets)
        d = numbers.model["d"]
        lr, on, correction = distance.rates(units, numbers, self.use_bias_correction)
        rate = d * lr * correction
        scale = distance.vector(units.each("layer_scale"), d)
        betas = distance.betas(units, d)
        live = distance.of_model(units)
        first, second, third = [on * (1 - beta) for beta in (*betas, betas[1].sqrt())]
        gain = distance.total(units, _gain, rate=scale * rate)
        counted = on * scale
        size = distance.size(units, keep=(1 - third) * counted, take=rate * third * counted)
        share = live["betas"][1] ** 0.5
        numerator = share * numbers.model["numerator"] + (1 - share) * gain
        estimate = numerator / ((1 - share) * size)
        new_d = d.maximum(estimate.minimum(d * live["growth_rate"]))
        distance.keep(numbers, size > 0, d=new_d, numerator=numerator)
        decay = rate * distance.vector(units.each("weight_decay"), d)
        m = (1 - first, scale * rate * first)
        s = (1 - third, rate * third)
        rate = torch.where(size > 0, on, 0.0)
        return distance.move(self, units, decay=decay, rate=rate, v=second, m=m, s=s)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = distance.decayed(u, group, self.decouple)
        return distance.adam(u, state, group, self.decouple)


def _gain(u: TensorList, state: State, group: Group) -> TensorList:
    """Return, for each element, the term that is added to r: the average step so far times u."""
    over = state["exp_avg_sq"].sqrt().add_(group["eps"]).div_(state["s"])
    return over.reciprocal_().mul_(group["rate"]).mul_(u)
