"""Functions that `DAdaptAdam` and `Prodigy` share. Both estimate the distance to the solution.

Here a unit is a parameter group. Vectors have one element per group, and the dtype of the
model-wide scalars. The rules first compute sums over the whole model, without storing the terms of
the sums. Then they update each element with these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Numbers, State, TensorList, Transform, Units
from torchzero_clip.core.norms import NAMED

AVERAGES = ("exp_avg", "exp_avg_sq", "s")


def begin(buckets: Sequence[Bucket]) -> tuple[Units, Numbers]:
    """Return the parameter groups of a step as units, and also the model-wide scalars."""
    return Units(buckets, "group", NAMED["l1"]), Numbers(buckets)


def decayed(u: TensorList, group: Group, decouple: bool) -> TensorList:
    """Return u. If the weight decay is not decoupled, add the decay to u."""
    return u if decouple else u.add(group["params"], alpha=group["weight_decay"])


def vector(values: Sequence[Any], like: Tensor) -> Tensor:
    """Return the values of all groups as one vector."""
    return torch.stack([torch.zeros_like(like) + x for x in values])


def betas(units: Units, like: Tensor) -> list[Tensor]:
    """Return each of the hyperparameters `betas` as a vector."""
    return [vector(row, like) for row in zip(*units.each("betas"), strict=True)]


def rates(units: Units, numbers: Numbers, corrected: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return three vectors: the learning rates, whether each rate is above 0, the bias corrections.

    A group whose learning rate is 0 does not change.
    """
    step = numbers.model["step"] + 1
    lr = vector(units.each("lr"), step)
    correction = torch.ones_like(lr)
    if corrected:
        first, second = betas(units, step)
        correction = (1 - second**step).sqrt() / (1 - first**step)
    return lr, (lr > 0).to(lr.dtype), correction


def of_model(units: Units) -> Group:
    """Return the hyperparameters of the first group, which the model-wide scalars use."""
    bucket = units.buckets[0]
    return bucket.bound.values(bucket.step.groups[0])


def total(units: Units, function: Callable[..., TensorList], **vectors: Tensor) -> Tensor:
    """Return the sum of `function` over all elements of the model."""
    return _as_one(units).sums_of(_views(units, function, vectors))[0]


def size(units: Units, **vectors: Tensor) -> Tensor:
    """Return ‖s‖₁ of the whole model after this step."""
    return _as_one(units).norms_of(_views(units, _summed, vectors))[0]


def _views(
    units: Units, function: Callable[..., TensorList], vectors: dict[str, Tensor]
) -> list[TensorList]:
    """Add weight decay, apply `function` to each element, and return the results of each bucket."""
    decouple = units.buckets[0].bound.transform.decouple

    def entered(u: TensorList, state: State, group: Group) -> TensorList:
        return function(decayed(u, group, decouple), state, group)

    return [bucket.view(entered, units, **vectors) for bucket in units.buckets]


def _summed(u: TensorList, state: State, group: Group) -> TensorList:
    """Return the s that this step would store, without storing it."""
    return state["s"].mul(group["keep"]).add_(u, alpha=group["take"])


def _as_one(units: Units) -> Units:
    """Return all parameters as one unit. Pipeline stages may have different groups."""
    return Units(units.buckets, "global", NAMED["l1"])


def keep(numbers: Numbers, moves: Tensor, **values: Tensor) -> None:
    """Store new model-wide scalars and count the step, if `moves` is True."""
    before = numbers.model
    values["step"] = before["step"] + 1
    numbers.set(None, {k: torch.where(moves, new, before[k]) for k, new in values.items()})
    numbers.store()


def move(rule: Transform, units: Units, **vectors: Any) -> list[Bucket]:
    """Apply the update of the rule in every group.

    For m and s, `vectors` has a pair: the factor of the old average, and the factor of the new
    value. For v, `vectors` has the weight of the new value.
    """
    for name in ("m", "s"):
        factor_of_old, factor_of_new = vectors.pop(name)
        vectors[f"keep_{name}"] = factor_of_old
        vectors[f"take_{name}"] = factor_of_new
    for bucket in units.buckets:
        bucket.apply(rule, units, **vectors)
    return units.buckets


def adam(u: TensorList, state: State, group: Group, decouple: bool) -> TensorList:
    """Update m, s and v with u, and return rate · (m / (√v + eps) + decay · w)."""
    m = state["exp_avg"].mul_(group["keep_m"]).add_(u, alpha=group["take_m"])
    state["s"].mul_(group["keep_s"]).add_(u, alpha=group["take_s"])
    v = state["exp_avg_sq"].lerp_(u.square_(), group["v"])
    # the result is computed in the memory of u, which saves temporary tensors
    u = u.copy_(v).sqrt_().add_(group["eps"]).div_(m).reciprocal_()
    if decouple:
        u = u.add_(group["params"], alpha=group["decay"])
    return u.mul_(group["rate"])
