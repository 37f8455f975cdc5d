"""What rules share that estimate how far away the solution is: numbers, an entry a group.

Groups are units here: vectors are in the precision of the numbers of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Numbers, Units
from torchzero_clip.core.norms import NAMED


def begin(buckets: Sequence[Bucket]) -> tuple[Units, Numbers]:
    """The groups of a step, and the numbers of the model."""
    return Units(buckets, "group", NAMED["l1"]), Numbers(buckets)


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


def keep(numbers: Numbers, moves: Tensor, **values: Tensor) -> None:
    """Keep new numbers of the model and count the step, where it moves."""
    before = numbers.model
    values["step"] = before["step"] + 1
    numbers.set(None, {k: torch.where(moves, new, before[k]) for k, new in values.items()})
    numbers.store()
