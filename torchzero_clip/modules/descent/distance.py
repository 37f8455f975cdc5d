"""What rules share that estimate how far away the solution is, and step accordingly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Numbers, TensorList, Units
from torchzero_clip.core.norms import NAMED


class Rates(NamedTuple):
    """The learning rates of a step: vectors with an entry a group, in the precision of d."""

    lr: Tensor
    on: Tensor
    """1 where the learning rate is above 0: a group without one is left alone."""
    correction: Tensor
    """Adam's bias correction, or 1."""


def units_of(buckets: Sequence[Bucket]) -> Units:
    """The groups, as units whose norms are sums of magnitudes."""
    return Units(buckets, "group", NAMED["l1"])


def flowing(units: Units, decouple: bool) -> list[TensorList]:
    """What flows, in the precision of state, with the decay where it is not decoupled."""
    us = [bucket.u.to(bucket.state_dtype) for bucket in units.buckets]
    for bucket, u in [] if decouple else zip(units.buckets, us, strict=True):
        u.add_(bucket.params, alpha=bucket.group["weight_decay"])
    return us


def vector(values: Sequence[Any], like: Tensor) -> Tensor:
    """Live values, one of each group, as a vector."""
    return torch.stack([torch.zeros_like(like) + x for x in values])


def number(units: Units, bucket: Bucket, vector: Tensor) -> Tensor:
    """The entry of a bucket's group, for its lists."""
    entry = units.operand(bucket, vector)
    assert isinstance(entry, Tensor)
    return entry


def betas(units: Units, like: Tensor) -> list[Tensor]:
    """The live value `betas`, each of them as a vector."""
    return [vector(row, like) for row in zip(*units.each("betas"), strict=True)]


def rates(units: Units, numbers: Numbers, corrected: bool) -> Rates:
    """The rates from the live values `lr` and `betas`, and from the steps that d has made."""
    step = numbers.model["step"] + 1
    lr = vector(units.each("lr"), step)
    correction = torch.ones_like(lr)
    if corrected:
        first, second = betas(units, step)
        correction = (1 - second**step).sqrt() / (1 - first**step)
    return Rates(lr, (lr > 0).to(lr.dtype), correction)


def of_model(buckets: Sequence[Bucket]) -> Group:
    """The live values that the numbers of the model hang on: those of the first group."""
    return buckets[0].bound.values(buckets[0].step.groups[0])


def keep(numbers: Numbers, moves: Tensor, values: dict[str, Tensor]) -> None:
    """Keep new numbers of the model and count the step, where d moves."""
    before = numbers.model
    values["step"] = before["step"] + 1
    numbers.set(None, {k: torch.where(moves, new, before[k]) for k, new in values.items()})
    numbers.store()
