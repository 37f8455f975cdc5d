"""NeuronNorm: a rule that scales the update of each neuron by the size of its past updates."""

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
    """Neuron-wise normalization: divides the update of each neuron by the RMS of its past updates.

    Put it after `Orthogonalize`. The method NorMuon is Muon with this rule. The norm of the matrix
    does not change.

    V ← β V + (1 - β) · mean of u² over each row;   N = u / (√V + 1e-8);   u ← N · ‖u‖ / ‖N‖

    If a row of u is zero, the V of this row does not change.

    Args:
        beta: The share of the average V that is kept per step. Default: 0.95.
        neurons: With "rows", each row is a neuron. With "longer", each column is a neuron if the
            matrix has more columns than rows. Default: "rows".
        stacks: How to treat a tensor with three dims. True means a stack of matrices. False means
            one matrix of shape (first, rest). None raises an error. With four or more dims, a
            tensor is one matrix of shape (first, rest), and True raises an error. Default: None.

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
    dim = ()  # units are slices, and `dims` returns their dims
    sets_norm = True
    clips = False
    pure = True

    def check(self) -> None:
        # NormRule.check forbids state with slices, but this rule stores its state itself
        super(NormRule, self).check()

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        check_shape(self, tensor, self.stacks)
        return self._along(tensor)

    def _along(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the dims that the weights of one neuron cover."""
        along = row_dims(tensor, self.stacks)
        if self.neurons == "rows" or not along:
            return along
        rows = tensor.shape[along[0] - 1]
        columns = math.prod([tensor.shape[d] for d in along])
        return (along[0] - 1,) if rows < columns else along

    def init(self, param: Tensor) -> dict[str, Tensor]:
        along = self._along(param)
        shape = [1 if d in along else n for d, n in enumerate(param.shape)]
        zeros = torch.zeros(shape, dtype=statistic_dtype(param), device=param.device)
        return {"rms": zeros}  # √V, because squares could overflow

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        norm = units.norm()
        size = over_matrices(units, norm, self.stacks)
        old_rms = [t for bucket in units.buckets for t in bucket.held()["rms"]]
        rms = torch.cat([t.to(units.home).flatten() for t in old_rms]).to(norm.dtype)
        betas = [torch.ones_like(norm) * beta for beta in units.each("beta")]
        average = torch.lerp(norm.square(), rms.square(), units.of_first_group(betas))
        rms = torch.where(units.finite(size) & (norm > 0), average.sqrt(), rms)
        parts = iter(rms.split([t.numel() for t in old_rms]))
        for bucket in units.buckets:
            state = bucket.state["rms"]
            state.copy_(TensorList([next(parts).view_as(t) for t in state]))
        normalized = norm / (rms + EPS)
        limit = normalized * (size / over_matrices(units, normalized, self.stacks))
        limit = torch.where(size == math.inf, torch.zeros_like(limit), limit)
        self.scale(units, norm, [limit] * len(units.groups))
        return buckets
