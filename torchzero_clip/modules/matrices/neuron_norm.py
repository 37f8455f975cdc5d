"""NeuronNorm: a rule that scales the update of each neuron by the size of its past updates."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, NormRule, TensorList
from torchzero_clip.core.bounds import Share
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import (
    Grid,
    NormKind,
    entry_of,
    grid,
    matrices_of,
    whole_matrix,
)
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.modules.matrices.batches import grid_for

EPS = 1e-8


class NeuronNorm(NormRule):
    """Neuron-wise normalization: divides the update of each neuron by the RMS of its past updates.

    Put it after `Orthogonalize`. The method NorMuon is Muon with this rule. The norm of the matrix
    does not change.

    V ← β V + (1 - β) · mean of u² over each row;   N = u / (√V + 1e-8);   u ← N · ‖u‖ / ‖N‖

    If a row of u is zero, the V of this row does not change.

    Args:
        beta: The share of the average V that is kept per step. Default: 0.95.
        neurons: With "rows", each row is a neuron. With "longer", each column is a neuron if the
            matrix has more columns than rows. Default: "rows".
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, LR, Modular, NeuronNorm, Orthogonalize, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> matrices = [p for p in model.parameters() if p.dim() == 2]
        >>> normuon = EMA(0.95, nesterov=True), Orthogonalize(), NeuronNorm()
        >>> opt = Modular(matrices, *normuon, WeightDecay(0.1), LR(1e-3))

    Reference:
        Li et al., "NorMuon: making Muon more efficient and scalable", arXiv 2510.05491.
    """

    beta: Live[Share] = 0.95
    neurons: Literal["rows", "longer"] = "rows"
    layout: MatrixLayout = None

    ord = "rms"
    dim = ()  # units are slices, and `grid` returns them
    sets_norm = True
    clips = False
    pure = True

    def check(self) -> None:
        # NormRule.check forbids state with slices, but this rule stores its state itself
        super(NormRule, self).check()

    @property
    def _kind(self) -> NormKind:
        """What the norm of a neuron covers."""
        return "row" if self.neurons == "rows" else "longer"

    def grid(self, name: str, param: Tensor) -> Grid:
        return grid_for(self, self._kind, name, param)

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return self._init_named("", param)

    def _init_named(self, name: str, param: Tensor) -> dict[str, Tensor]:
        if entry_of(self, name, param) is None:
            shape = grid(whole_matrix(param.shape), self._kind).matrices.shape
        else:  # the neurons of one matrix after another
            matrices = matrices_of(self, name, param, takes_complex=True)
            shape = (sum(map(math.prod, grid(matrices, self._kind).norms)),)
        zeros = torch.zeros(shape, dtype=statistic_dtype(param), device=param.device)
        return {"rms": zeros}  # √V, because squares could overflow

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        norm = units.over(units.norm(), whole=False, function=_root_of_mean)
        size = units.over(norm)
        old_rms = [t for bucket in units.buckets for t in bucket.held()["rms"]]
        grids = units.division.matrix_grids
        pairs = zip(grids, old_rms, strict=True)
        spread = [found.spread(t.to(units.home)) for found, t in pairs]
        rms = torch.cat(spread).to(norm.dtype)
        betas = [torch.ones_like(norm) * beta for beta in units.each("beta")]
        average = torch.lerp(norm.square(), rms.square(), units.of_first_group(betas))
        rms = torch.where(units.finite(size) & (norm > 0), average.sqrt(), rms)
        pairs = zip(grids, rms.split([t.numel() for t in spread]), strict=True)
        parts = iter([found.collect(part) for found, part in pairs])
        for bucket in units.buckets:
            state = bucket.state["rms"]
            state.copy_(TensorList([next(parts).view_as(t) for t in state]))
        normalized = norm / (rms + EPS)
        limit = normalized * (size / units.over(normalized))
        limit = torch.where(size == math.inf, torch.zeros_like(limit), limit)
        self.scale(units, norm, [limit] * len(units.groups))
        return buckets


def _root_of_mean(norms: Tensor, **dims: Any) -> Tensor:
    """Return the root of the mean of squared norms."""
    return norms.square().mean(**dims).sqrt()
