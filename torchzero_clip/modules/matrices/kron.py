"""Kron: momentum that is whitened by a Kronecker product of two learned factors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorwiseTransform
from torchzero_clip.core.bounds import Count, Fraction, NonNegative, Positive, Share, Whole
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.logical_matrices import LogicalMatrices, entry_of, whole_matrix
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices import lessons, whitening
from torchzero_clip.modules.matrices.batches import PRODUCTS


class Kron(TensorwiseTransform):
    """PSGD Kron: momentum that is whitened by a Kronecker product of two learned factors.

    The rule needs only matrix products and triangular solves, and no eigenvectors or matrix roots.
    With `ClipRMS(1.1)` after it, this is PSGD Kron (tested against kron_torch).

    m ← β m + (1 - β) u;   u ← Qₗᵀ Qₗ m̂ Qᵣᵀ Qᵣ

    Here m̂ is m with bias correction, as in `Adam`. The factors Qₗ and Qᵣ are triangular. They
    learn to whiten m̂. With A = Qₗ m̂ Qᵣᵀ and B = Qₗ⁻ᵀ V Qᵣ⁻¹, where V is normal noise,

        Qₗ ← Qₗ - precond_lr · triu(A Aᵀ - B Bᵀ) Qₗ / ‖A Aᵀ + B Bᵀ‖

    and Qᵣ learns in the same way. A vector has one diagonal factor.

    Args:
        beta: The decay rate of the average m. Default: 0.9.
        precond_lr: The learning rate of the factors. Default: 0.1.
        every: Update the factors every `every` steps. With None, the rule uses the official
            schedule: every step up to step 501, then less and less often, and finally every 34th
            step. Default: None.
        max_dim: The longest side that has a triangular factor. A longer side has a diagonal factor.
            Default: 8192.
        diagonal: More sides that have a diagonal factor. "longer" means the longer side. "one"
            means the longer side, or the columns of a square matrix. "all" means all sides. None
            means no more sides. Default: None.
        initial: The initial scale of the product of both factors. It is rounded to float32, also
            for float64 parameters. Default: 1.0.
        eps: The size of the noise that is added to m̂ when the factors learn. The noise limits the
            factors: they multiply by at most 1 / eps. Default: 1e-12.
        stagger: If True, different parameters update their factors in different steps, so that all
            steps take equally long. Default: False.
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, ClipRMS, Kron, Modular, WeightDecay
        >>> model = torch.nn.Linear(10, 5)
        >>> opt = Modular(model.parameters(), Kron(), ClipRMS(1.1), WeightDecay(0.01), LR(3e-4))

    Reference:
        Pooladzandi, Li, "Curvature-informed SGD via general purpose Lie-group preconditioners",
        arXiv 2402.04553; evanatyourservice/kron_torch.
    """

    beta: Live[Share] = 0.9
    precond_lr: Live[Fraction] = 0.1
    every: Count | None = None
    max_dim: Whole = 8192
    diagonal: Literal["longer", "one", "all"] | None = None
    initial: Positive = 1.0
    eps: Live[NonNegative] = 1e-12
    stagger: bool = False
    layout: MatrixLayout = None

    complex = "refuse"  # type: ignore[assignment]
    leaves = "ones"
    batched = True
    impure = PRODUCTS

    def matrices_of(self, name: str, param: Tensor) -> LogicalMatrices | None:
        if param.numel() and param.dim() < 2 and entry_of(self, name, param) is None:
            return whole_matrix(param.shape)
        matrices = super().matrices_of(name, param)
        if matrices is None or param.dim() < 2:
            return matrices
        return matrices.with_columns_as_rows()

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        state = {"step": torch.zeros(1), "exp_avg": torch.zeros(rows, columns)}
        if columns == 1:  # a vector, because matrices with one column are treated as one row
            return {**state, "left": torch.full((rows,), self.initial, dtype=torch.float32)}
        for side, n, other in (("left", rows, columns), ("right", columns, rows)):
            make = torch.ones if whitening.is_diagonal(self, side, n, other) else torch.eye
            state[side] = make(n, dtype=torch.float32) * self.initial**0.5
        return state

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        average = state["exp_avg"]
        moved = average + (u - average) * (1 - group["beta"])
        return {"step": state["step"] + 1, "exp_avg": moved}

    def refresh_matrix(self, state: MatrixState, group: Group) -> MatrixState:
        noise = whitening.normal(state["exp_avg"], state["step"])
        m = self._average(state, group)
        return whitening.lesson(m, state, noise, group["precond_lr"], group["eps"])

    def update_tensor(self, u: Tensor, state: MatrixState, group: Group) -> Tensor:
        m = whitening.twice(state["left"], self._average(state, group))
        return whitening.twice(state["right"], m.mT).mT if "right" in state else m

    def is_due(self, step: int) -> bool:
        return lessons.is_due(step) if self.every is None else super().is_due(step)

    @property
    def rhythm(self) -> str:
        return lessons.RHYTHM if self.every is None else super().rhythm

    def _average(self, state: MatrixState, group: Group) -> Tensor:
        """Return the average with bias correction."""
        return state["exp_avg"] / (1 - group["beta"] ** state["step"]).unsqueeze(-1)
