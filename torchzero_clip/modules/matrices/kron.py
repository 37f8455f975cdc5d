"""Kron: momentum that is whitened by a Kronecker product of two learned factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorwiseTransform
from torchzero_clip.core.bounds import Count, Fraction, NonNegative, Positive, Share, Whole
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices import lessons, whitening
from torchzero_clip.modules.matrices.batches import PRODUCTS, matrix_shape
from torchzero_clip.modules.matrices.blocks import Blocks, block_rows, check_blocks


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
        initial: The initial scale of the product of both factors. Default: 1.0.
        eps: The size of the noise that is added to m̂ when the factors learn. The noise limits the
            factors: they multiply by at most 1 / eps. Default: 1e-12.
        stagger: If True, different parameters update their factors in different steps, so that all
            steps take equally long. Default: False.
        stacks: How to treat a tensor with three dims. True means a stack of matrices. False means
            one matrix of shape (first, rest). None raises an error. With four or more dims, a
            tensor is one matrix of shape (first, rest), and True raises an error. Default: None.
        blocks: The blocks of rows of fused matrices, as in `Orthogonalize`. Each block has its own
            factors. Default: None, no blocks.

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
    stacks: bool | None = None
    blocks: Blocks = None

    complex = "refuse"  # type: ignore[assignment]
    leaves = "ones"
    batched = True
    impure = PRODUCTS

    def check(self) -> None:
        super().check()
        check_blocks(self)

    def rows_of(self, name: str, param: Tensor) -> Sequence[int]:
        if not param.numel():
            return []
        if param.dim() < 2:
            return block_rows(self, name, param, param.numel())
        count, rows, columns = matrix_shape(self, param, self.stacks)
        rows_of_matrices = block_rows(self, name, param, rows) * count
        if columns == 1 and len(set(rows_of_matrices)) == 1:
            return [1] * len(rows_of_matrices)  # a matrix of one column is treated as one row
        return rows_of_matrices

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        state = {"step": torch.zeros(1), "exp_avg": torch.zeros(rows, columns)}
        if columns == 1:  # a vector, because matrices with one column are treated as one row
            return {**state, "left": torch.full((rows,), self.initial)}
        for side, n, other in (("left", rows, columns), ("right", columns, rows)):
            one = torch.ones(n) if whitening.is_diagonal(self, side, n, other) else torch.eye(n)
            state[side] = one * self.initial**0.5
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
