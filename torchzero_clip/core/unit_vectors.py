"""Vectors with an entry a unit, and lists that span all units."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.tensorlist import TensorList


class Joined(Lazy):
    """The lists of several buckets as one, put together when it is read; it can be measured."""

    __slots__ = ("lists",)

    def __init__(
        self, lists: Sequence[TensorList], measure: Callable[[TensorList], Tensor]
    ) -> None:
        super().__init__()
        self.lists, self.measure, self.owned = list(lists), measure, False

    def __len__(self) -> int:
        return sum(map(len, self.lists))

    def compute(self) -> list[Tensor]:
        return [t for some in self.lists for t in some]


def of_first_group(
    vectors: Sequence[Tensor], first_group: Sequence[int], lengths: Sequence[int] | None
) -> Tensor:
    """Of each unit the entry in the vector of its first group."""
    out = vectors[0]
    for g in range(1, len(vectors)):
        mask = flags([first == g for first in first_group], out.device, lengths)
        out = torch.where(mask.view(-1, *[1] * (out.dim() - 1)), vectors[g], out)
    return out


def flags(
    values: Sequence[bool], device: torch.device, lengths: Sequence[int] | None = None
) -> Tensor:
    """A vector of known truths on a device, each as often as `lengths` says."""
    if lengths is not None:
        rows = zip(values, lengths, strict=True)
        return torch.cat([torch.full((n,), v, device=device) for v, n in rows])
    if not any(values):
        return torch.zeros(len(values), dtype=torch.bool, device=device)
    like = torch.empty(0, dtype=torch.float32, device=device)
    return norms.numbers([float(value) for value in values], like) > 0
