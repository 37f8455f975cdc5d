"""What rules share that estimate how far away the solution is, and step accordingly.

Groups are units here: vectors have an entry a group, in the precision of the numbers of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    Group,
    Numbers,
    TensorList,
    Transform,
    Units,
    zeros_like_state,
)
from torchzero_clip.core.norms import NAMED

AVERAGES = ("exp_avg", "exp_avg_sq", "s")


def averages(param: Tensor) -> dict[str, Tensor]:
    """The averages m and v of a parameter, and the sum s."""
    return {name: zeros_like_state(param) for name in AVERAGES}


def begin(rule: Transform, buckets: Sequence[Bucket]) -> tuple[Units, Numbers]:
    """The groups of a step, and the numbers of the model."""
    for bucket in buckets:
        rule.refuse_complex(bucket)
    return Units(buckets, "group", NAMED["l1"]), Numbers(buckets)


def flowing(units: Units, decouple: bool) -> list[TensorList]:
    """What flows, in the precision of state, with the decay where it is not decoupled."""
    us = [bucket.u.to(bucket.state_dtype) for bucket in units.buckets]
    if decouple:
        return us
    rows = zip(units.buckets, us, strict=True)
    return [decayed(bucket, u, bucket.group["weight_decay"]) for bucket, u in rows]


def decayed(bucket: Bucket, u: TensorList, decay: Any) -> TensorList:
    """u + decay · w"""
    return bucket.entrywise(TensorList.add_, u, x=bucket.params, alpha=decay)


def adam(u: TensorList, m: TensorList, v: TensorList, eps: Any) -> TensorList:
    """m / (√v + eps), in the memory of u."""
    return u.copy_(v).sqrt_().add_(eps).reciprocal_().mul_(m)


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


def entry(units: Units, bucket: Bucket, values: Tensor) -> Tensor:
    """The entry of a bucket's group, for its lists."""
    number = units.operand(bucket, values)
    assert isinstance(number, Tensor)
    return number


def entries(units: Units, bucket: Bucket, **vectors: Tensor) -> dict[str, Tensor]:
    """The entries of a bucket's group, for its lists."""
    return {name: entry(units, bucket, values) for name, values in vectors.items()}


def averages_of(bucket: Bucket) -> dict[str, TensorList]:
    """The averages of a bucket's parameters, by name."""
    return {name: bucket.state[name] for name in AVERAGES}


def dot(
    units: Units, some: Sequence[TensorList], others: Sequence[TensorList], weights: Tensor
) -> Tensor:
    """The inner product of the whole model, the others with these weights."""
    products = [
        bucket.entrywise(_product, x, by=u, weight=entry(units, bucket, weights))
        for bucket, u, x in zip(units.buckets, some, others, strict=True)
    ]
    return _as_one(units).sums_of(products)[0]


def _product(x: TensorList, by: TensorList, weight: Tensor) -> TensorList:
    return x.mul_(weight).mul_(by)


def size(units: Units, weights: Tensor) -> Tensor:
    """‖s‖₁ of the whole model, s with these weights."""
    lists = [
        bucket.entrywise(TensorList.mul, bucket.state["s"], x=entry(units, bucket, weights))
        for bucket in units.buckets
    ]
    return _as_one(units).norms_of(lists)[0]


def _as_one(units: Units) -> Units:
    """All as one unit, and so the stages of a pipeline too, whichever groups they have."""
    return Units(units.buckets, "global", NAMED["l1"])


def of_model(units: Units) -> Group:
    """The live values that the numbers of the model hang on: those of the first group."""
    link, step = units.buckets[0].bound, units.buckets[0].step
    return link.values(step.groups[0])


def keep(numbers: Numbers, moves: Tensor, **values: Tensor) -> None:
    """Keep new numbers of the model and count the step, where it moves."""
    before = numbers.model
    values["step"] = before["step"] + 1
    numbers.set(None, {k: torch.where(moves, new, before[k]) for k, new in values.items()})
    numbers.store()
