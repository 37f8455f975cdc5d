"""StableAdam: Adam that steps shorter where gradients outgrow their own average."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, NormRule, State, TensorList
from torchzero_clip.core.bounds import NonNegative, Positive, Share
from torchzero_clip.core.state import averages_of
from torchzero_clip.core.transform import pairs, unpaired


class StableAdam(NormRule):
    """u ← (m̂ / (√v̂ + eps) + weight_decay · w) / max(1, r);   r = RMS(u / √max(v̂, eps²))

    m̂ and v̂ are the averages of `Adam`, this step's gradient included. r is taken over each tensor:
    1 where gradients are as large as usual, and large in the first steps after they grow.

    Args:
        betas: How much of the two averages is kept a step.
        eps: Added to the denominator, and the smallest √v̂ that r is measured with.
        weight_decay: How much of the parameter joins the update, shortened with it. `WeightDecay`
            after this link is the decay that is not.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, StableAdam
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), StableAdam(weight_decay=0.01), LR(1e-3))

    Reference:
        Wortsman et al., "Stable and low-precision training for large-scale vision-language models",
        arXiv 2304.13013.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.99)
    eps: Live[Positive] = 1e-6
    weight_decay: Live[NonNegative] = 0.0

    ord = "rms"
    state_kinds = {"exp_avg": "linear", "exp_avg_sq": "squares"}
    clips = False
    pure = True

    leaves = "ones"

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return averages_of(param, "exp_avg", "exp_avg_sq")

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        updates, growth = zip(*[self._adam(bucket) for bucket in units.buckets], strict=True)
        r = units.norms_of(growth)
        self.scale(units, r, [1.0] * len(units.groups), updates)
        return buckets

    def _adam(self, bucket: Bucket) -> tuple[TensorList, TensorList]:
        """The update that is not yet shortened, and u / √max(v̂, eps²)."""
        group, state = bucket.group, bucket.state
        beta1, beta2 = group["betas"]
        u = pairs(bucket.u)
        t = state["step"].add_(1).stack()
        pairs(state["exp_avg"]).lerp_(u, 1 - beta1)
        pairs(state["exp_avg_sq"]).mul_(beta2).addcmul_(u, u, 1 - beta2)
        biases = {"bias": 1 - beta1**t, "root_of_bias": (1 - beta2**t).sqrt()}
        growth, adam = bucket.view(_growth, **biases), bucket.view(_adam, **biases)
        if not bucket.dtype.is_complex:
            return adam, growth
        return unpaired(adam), unpaired(growth.mul_(0.5**0.5))  # each is two entries of the mean


def _root(state: State, group: Group) -> TensorList:
    return pairs(state["exp_avg_sq"]).sqrt().div_(group["root_of_bias"])


def _growth(u: TensorList, state: State, group: Group) -> TensorList:
    return _root(state, group).maximum_(group["eps"]).div_(pairs(u)).reciprocal_()


def _adam(u: TensorList, state: State, group: Group) -> TensorList:
    over = _root(state, group).add_(group["eps"]).div_(pairs(state["exp_avg"]))
    made = over.reciprocal_().div_(group["bias"])
    return made.add_(pairs(group["params"]), alpha=group["weight_decay"])
