"""Kron: an average of the update, whitened by a Kronecker product that learns from noise."""

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
    """m ← β m + (1 - β) u;   u ← Qₗᵀ Qₗ m̂ Qᵣᵀ Qᵣ

    m̂ is m, corrected for its start as in `Adam`. Qₗ and Qᵣ are triangular and learn to make it
    white: with A = Qₗ m̂ Qᵣᵀ, and B = Qₗ⁻ᵀ V Qᵣ⁻¹ of normal noise V,

        Qₗ ← Qₗ - precond_lr · triu(A Aᵀ - B Bᵀ) Qₗ / ‖A Aᵀ + B Bᵀ‖

    and the same from the other side. Vectors have one diagonal factor. With `ClipRMS(1.1)` behind
    it is PSGD Kron (tested against kron_torch).

    Args:
        beta: How much of m stays.
        precond_lr: How fast the factors learn.
        every: Steps from one lesson of the factors to the next. None is the official schedule: in
            each of the first 501 steps, then ever more seldom, at last in every 34th.
        max_dim: A side that is longer has a diagonal factor.
        diagonal: Which other sides have one: "longer" the longer side, "one" that of a square
            matrix too, its columns, "all" both.
        initial: The product of both factors to begin with.
        eps: Of the noise that the factors learn beside m̂; the factors multiply by 1 / eps at most.
        stagger: Whether parameters take turns to learn, so that all steps are as long.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.
        blocks: The rows of fused matrices, each block with factors of its own, as in
            `Orthogonalize`.

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
        each = block_rows(self, name, param, rows) * count
        return [1] * len(each) if columns == 1 and len(set(each)) == 1 else each

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        made = {"step": torch.zeros(1), "exp_avg": torch.zeros(rows, columns)}
        if columns == 1:  # a vector; matrices of one column come as one of one row
            return {**made, "left": torch.full((rows,), self.initial)}
        for side, n, other in (("left", rows, columns), ("right", columns, rows)):
            one = torch.ones(n) if whitening.is_diagonal(self, side, n, other) else torch.eye(n)
            made[side] = one * self.initial**0.5
        return made

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        average = state["exp_avg"]
        moved = average + (u - average) * (1 - group["beta"])
        return {"step": state["step"] + 1, "exp_avg": moved}

    def refresh_matrix(self, state: MatrixState, group: Group) -> MatrixState:
        noise = whitening.normal(state["exp_avg"], state["step"])
        rate, eps = group["precond_lr"], group["eps"]
        return whitening.lesson(self._average(state, group), state, noise, rate, eps)

    def update_tensor(self, u: Tensor, state: MatrixState, group: Group) -> Tensor:
        m = whitening.twice(state["left"], self._average(state, group))
        return whitening.twice(state["right"], m.mT).mT if "right" in state else m

    def is_due(self, step: int) -> bool:
        return lessons.is_due(step) if self.every is None else super().is_due(step)

    @property
    def rhythm(self) -> str:
        return lessons.RHYTHM if self.every is None else super().rhythm

    def _average(self, state: MatrixState, group: Group) -> Tensor:
        """The average, corrected for its start at zero."""
        return state["exp_avg"] / (1 - group["beta"] ** state["step"]).unsqueeze(-1)
