"""Hyperball: a rule that keeps the norm of the weights constant."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchzero_clip.core import Bucket, NormRule, Scope
from torchzero_clip.modules.descent.max_norm import project


class Hyperball(NormRule):
    """Hyperball: keeps the norm of each weight equal to its norm before the first step.

    Use it in place of weight decay for weights whose scale does not matter, such as a matrix that
    is followed by a normalization layer. Put it after `LR`, where the update is the step that is
    subtracted from the weights.

    w ← R · w / ‖w‖ after the step, R the norm of w before the first: u ← w - R (w - u) / ‖w - u‖

    The rule does not change the step of a weight that is still zero, because such a weight has no R
    yet. It also does not change the step of a weight with a single element.

    Args:
        dim: The tensors that share one norm: None for a separate norm per tensor, or "layer",
            "group" or "global". Slices are not supported. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Hyperball, Modular, TrustRatio
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), TrustRatio(1.0), LR(1e-2), Hyperball())

    Reference:
        Wen et al., "Fantastic pretraining optimizers and where to find them II: Hyperball
        optimization", arXiv 2606.16899.
    """

    dim: Scope = None

    min_size = 2
    sets_norm = True
    widens = True
    place = "end"
    clips = False
    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {"radius": 0.0}

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        state = units.load(self.init_unit())
        norm = units.norms_of([bucket.params for bucket in units.buckets])
        first = torch.where(units.finite(norm), norm, 0.0)
        radius = torch.where(state["radius"] > 0, state["radius"], first)
        units.store({"radius": radius})
        limit = torch.where(radius > 0, radius, math.inf)
        project(self, units, [limit] * len(units.groups))
        return buckets
