"""What rules share that estimate how far away the solution is.

Groups are units here: vectors have an entry a group, in the precision of the numbers of the model.
Sums of the whole model are of lists that nothing is written for; they come first, and then the
update of each entry with them. An accelerator takes both part by part.
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
    """The groups of a step, and the numbers of the model."""
    return Units(buckets, "group", NAMED["l1"]), Numbers(buckets)


def decayed(u: TensorList, group: Group, decouple: bool) -> TensorList:
    """u with the decay that joins it, unless that is apart."""
    return u if decouple else u.add(group["params"], alpha=group["weight_decay"])


def vector(values: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers, one of each group, as a vector."""
    return torch.stack([torch.zeros_like(like) + x for x in values])


def betas(units: Units, like: Tensor) -> list[Tensor]:
    """The live value `betas`, each of them as a vector."""
    return [vector(row, like) for row in zip(*units.each("betas"), strict=True)]


def rates(units: Units, numbers: Numbers, corrected: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The learning rates, where they are above 0, as 1 or 0, and Adam's bias correction, or 1.

    A group without a learning rate is left alone.
    """
    step = numbers.model["step"] + 1
    lr = vector(units.each("lr"), step)
    correction = torch.ones_like(lr)
    if corrected:
        first, second = betas(units, step)
        correction = (1 - second**step).sqrt() / (1 - first**step)
    return lr, (lr > 0).to(lr.dtype), correction


def of_model(units: Units) -> Group:
    """The live values that the numbers of the model hang on: those of the first group."""
    link, step = units.buckets[0].bound, units.buckets[0].step
    return link.values(step.groups[0])


def total(units: Units, function: Callable[..., TensorList], **vectors: Tensor) -> Tensor:
    """The sum over the whole model of what a function makes of each entry."""
    return _as_one(units).sums_of(_views(units, function, vectors))[0]


def size(units: Units, **vectors: Tensor) -> Tensor:
    """‖s‖₁ of the whole model, after this step."""
    return _as_one(units).norms_of(_views(units, _summed, vectors))[0]


def _views(
    units: Units, function: Callable[..., TensorList], vectors: dict[str, Tensor]
) -> list[TensorList]:
    decouple = units.buckets[0].bound.transform.decouple

    def entered(u: TensorList, state: State, group: Group) -> TensorList:
        return function(decayed(u, group, decouple), state, group)

    return [bucket.view(entered, units, **vectors) for bucket in units.buckets]


def _summed(u: TensorList, state: State, group: Group) -> TensorList:
    return state["s"].mul(group["keep"]).add_(u, alpha=group["take"])


def _as_one(units: Units) -> Units:
    """All as one unit, and so the stages of a pipeline too, whichever groups they have."""
    return Units(units.buckets, "global", NAMED["l1"])


def keep(numbers: Numbers, moves: Tensor, **values: Tensor) -> None:
    """Keep new numbers of the model and count the step, where it moves."""
    before = numbers.model
    values["step"] = before["step"] + 1
    numbers.set(None, {k: torch.where(moves, new, before[k]) for k, new in values.items()})
    numbers.store()


def move(rule: Transform, units: Units, **vectors: Any) -> list[Bucket]:
    """Have the rule do `adam` in every group.

    Of m and s what stays and what comes, of v the share of what comes.
    """
    for name in ("m", "s"):
        vectors[f"keep_{name}"], vectors[f"take_{name}"] = vectors.pop(name)
    for bucket in units.buckets:
        bucket.apply(rule, units, **vectors)
    return units.buckets


def adam(u: TensorList, state: State, group: Group, decouple: bool) -> TensorList:
    """u ← rate · (m / (√v + eps) + decay · w), once u is in m and s, and u² in v."""
    m = state["exp_avg"].mul_(group["keep_m"]).add_(u, alpha=group["take_m"])
    state["s"].mul_(group["keep_s"]).add_(u, alpha=group["take_s"])
    v = state["exp_avg_sq"].lerp_(u.square_(), group["v"])
    u = u.copy_(v).sqrt_().add_(group["eps"]).div_(m).reciprocal_()  # in the memory of u
    u = u.add_(group["params"], alpha=group["decay"]) if decouple else u
    return u.mul_(group["rate"])
