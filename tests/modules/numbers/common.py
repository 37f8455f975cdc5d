"""A chain on some parameters: gradients in, what is subtracted out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip import (
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipPercentile,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    SoftClip,
    Standardize,
)

inf, nan = math.inf, math.nan


class Bench:
    """A chain on some parameters: gradients in, what is subtracted out."""

    def __init__(self, links, *shapes, dtype=torch.float32, groups=None, names=None):
        links = links if isinstance(links, tuple) else (links,)
        self.params = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        given = self.params
        if groups is not None:
            given = [{"params": [p], **keys} for p, keys in zip(given, groups, strict=True)]
        if names is not None:
            given = list(zip(names, self.params, strict=True))
        self.opt = Modular(given, *links)

    def __call__(self, *grads):
        """One step; the parameters start at zero, so minus them is the update."""
        for p, grad in zip(self.params, grads, strict=True):
            p.data.zero_()
            p.grad = None if grad is None else torch.as_tensor(grad).to(p.dtype)
        self.opt.step()
        return [0 - p.detach() for p in self.params]


def once(links, *grads, dtype=torch.float32, **keys):
    """The updates of one step, one for each gradient."""
    grads = [g if isinstance(g, Tensor) else torch.tensor(g, dtype=dtype) for g in grads]
    return Bench(links, *[g.shape for g in grads], dtype=grads[0].dtype, **keys)(*grads)


def sequence(links, inputs, dtype=torch.float32):
    """What one parameter of one element gets, step by step."""
    bench = Bench(links, 1, dtype=dtype)
    return [bench([float(x)])[0].item() for x in inputs]


CLIPPING = {
    "ClipValue": ClipValue(5.0),
    "ClipNorm": ClipNorm(5.0),
    "ClipNorm global": ClipNorm(5.0, dim="global"),
    "ClipNorm slices": ClipNorm(5.0, dim=0),
    "ClipNorm l1": ClipNorm(7.0, "l1"),
    "ClipRMS": ClipRMS(math.sqrt(12.5)),
    "ClipPercentile": ClipPercentile(100),
    "ClipNormGrowth": ClipNormGrowth(),
    "ClipValueGrowth": ClipValueGrowth(),
    "ClipNormByEMA": ClipNormByEMA(0.0),
    "ClipValueByEMA": ClipValueByEMA(0.0),
}

NORM_RULES = {
    "ClipNorm": lambda dim: ClipNorm(1.0, dim=dim),
    "Normalize": lambda dim: Normalize(1.0, dim=dim),
    "ClipRMS": lambda dim: ClipRMS(1.0, dim=dim),
    "SoftClip": lambda dim: SoftClip(1.0, dim=dim),
    "Standardize": lambda dim: Standardize(dim=dim),
    "ClipNormGrowth": lambda dim: ClipNormGrowth(dim=dim),
    "ClipNormByEMA": lambda dim: ClipNormByEMA(dim=dim),
    "NormalizeByEMA": lambda dim: NormalizeByEMA(dim=dim),
}
