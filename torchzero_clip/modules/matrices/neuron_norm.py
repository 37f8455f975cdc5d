"""NeuronNorm: neurons that have moved much move less, and the matrix as far as before."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, NormRule, TensorList
from torchzero_clip.core.bounds import Share
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.modules.matrices.batches import check_shape, over_matrices, row_dims

EPS = 1e-8


class NeuronNorm(NormRule):
    """V ← β V + (1 - β) · mean of u² over each row;   N = u / (√V + 1e-8);   u ← N · ‖u‖ / ‖N‖

    After `Orthogonalize` it is what NorMuon adds to Muon. A row of zeros leaves its V as it was.

    Args:
        beta: How much of the average V stays.
        neurons: "rows", or "longer" for the columns of matrices with more columns than rows.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.

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
    stacks: bool | None = None

    ord = "rms"
    dim = ()  # slices, which `dims` names
    sets_norm = True
    clips = False
    pure = True

    def check(self) -> None:
        super(NormRule, self).check()  # which refuses memory of slices: it has its place here

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        check_shape(self, tensor, self.stacks)
        return self._along(tensor)

    def _along(self, tensor: Tensor) -> tuple[int, ...]:
        """The dims that the weights of a neuron run along."""
        along = row_dims(tensor, self.stacks)
        if self.neurons == "rows" or not along:
            return along
        rows, columns = tensor.shape[along[0] - 1], math.prod([tensor.shape[d] for d in along])
        return (along[0] - 1,) if rows < columns else along

    def init(self, param: Tensor) -> dict[str, Tensor]:
        along = self._along(param)  # also of vectors, which never get here
        shape = [1 if d in along else n for d, n in enumerate(param.shape)]
        zeros = torch.zeros(shape, dtype=statistic_dtype(param), device=param.device)
        return {"rms": zeros}  # √V: squares would leave its range

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        norm = units.norm()
        size = over_matrices(units, norm, self.stacks)
        held = [t for bucket in units.buckets for t in bucket.held()["rms"]]
        rms = torch.cat([t.to(units.home).flatten() for t in held]).to(norm.dtype)
        betas = [torch.ones_like(norm) * beta for beta in units.each("beta")]
        average = torch.lerp(norm.square(), rms.square(), units.of_first_group(betas))
        rms = torch.where(units.finite(size) & (norm > 0), average.sqrt(), rms)
        parts = iter(rms.split([t.numel() for t in held]))
        for bucket in units.buckets:
            old = bucket.state["rms"]
            old.copy_(TensorList([next(parts).view_as(t) for t in old]))
        new = norm / (rms + EPS)
        limit = new * (size / over_matrices(units, new, self.stacks))
        limit = torch.where(size == math.inf, torch.zeros_like(limit), limit)
        self.scale(units, norm, [limit] * len(units.groups))
        return buckets
