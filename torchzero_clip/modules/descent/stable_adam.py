"""StableAdam: Adam with shorter steps if gradients are much larger than their average."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, NormRule, State, TensorList
from torchzero_clip.core.bounds import NonNegative, Positive, Share
from torchzero_clip.core.state import averages_of
from torchzero_clip.core.transform import pairs, unpaired


class StableAdam(NormRule):
    """StableAdam: Adam that shortens steps if the gradients are much larger than their average.

    Use it against loss spikes, in place of norm clipping.

    u ← (m̂ / (√v̂ + eps) + weight_decay · w) / max(1, r);   r = RMS(u / √max(v̂, eps²))

    Here m̂ and v̂ are the averages of `Adam`, which include the current gradient. Each tensor has
    its own ratio r. If gradients have their usual size, r is about 1. If gradients grow, r is large
    for the first steps.

    Args:
        betas: The decay rates of the averages m and v. Default: (0.9, 0.99).
        eps: A small number that is added to the denominator. It is also the smallest √v̂ in r.
            Default: 1e-6.
        weight_decay: The factor of the weight decay: `weight_decay` · w is added to the update
            before the update is shortened. If you use `WeightDecay` after this link instead, the
            decay is not shortened. Default: 0.0.

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
        """Return m̂ / (√v̂ + eps) + weight_decay · w."""
        state = bucket.state
        beta1, beta2 = bucket.group["betas"]
        u = pairs(bucket.u)
        t = state["step"].add_(1).stack()
        pairs(state["exp_avg"]).lerp_(u, 1 - beta1)
        pairs(state["exp_avg_sq"]).mul_(beta2).addcmul_(u, u, 1 - beta2)
        biases = {"bias": 1 - beta1**t, "root_of_bias": (1 - beta2**t).sqrt()}
        growth = bucket.view(_growth, **biases)
        adam = bucket.view(_adam, **biases)
        if not bucket.dtype.is_complex:
            return adam, growth
        # the mean square counts a complex element once, but it has two real parts
        return unpaired(adam), unpaired(growth.mul_(0.5**0.5))


def _root(state: State, group: Group) -> TensorList:
    """Return √v̂."""
    return pairs(state["exp_avg_sq"]).sqrt().div_(group["root_of_bias"])


def _growth(u: TensorList, state: State, group: Group) -> TensorList:
    """Return u / √max(v̂, eps²)."""
    return _root(state, group).maximum_(group["eps"]).div_(pairs(u)).reciprocal_()


def _adam(u: TensorList, state: State, group: Group) -> TensorList:
    inverse = _root(state, group).add_(group["eps"]).div_(pairs(state["exp_avg"]))
    step = inverse.reciprocal_().div_(group["bias"])
    return step.add_(pairs(group["params"]), alpha=group["weight_decay"])
