"""Shampoo: an average of the update, whitened from both sides."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorwiseTransform
from torchzero_clip.core.bounds import Count, Positive, Share, Whole, Within
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices.batches import PRODUCTS
from torchzero_clip.modules.matrices.blocks import Blocks, check_blocks
from torchzero_clip.modules.matrices.eigenbases import (
    SIDES,
    average,
    back,
    eigenvalues,
    eigenvectors,
    gram,
    into,
    rows_with_bases,
    sides_up_to,
    sorted_after,
)


class Shampoo(TensorwiseTransform):
    """L ← β₂ L + (1 - β₂) u uᵀ;   R ← β₂ R + (1 - β₂) uᵀ u;   u ← L⁻ᵖ m R⁻ᵖ

    m is an average of u as in `Adam`, and L⁻ᵖ is Q (λ + eps)⁻ᵖ Qᵀ with the eigenvectors Q and
    eigenvalues λ of L / (1 - β₂ᵗ). The first eigenvectors are exact; every few steps bring them
    nearer to those of then, by one power iteration and its QR decomposition. Its authors take the
    size of a step from Adam: `Graft(Adam(betas), Shampoo(betas))` (tested against
    facebookresearch/optimizers).

    Args:
        betas: How much of m, and of L and R, stays.
        eps: Added to the eigenvalues.
        exponent: p, of each side.
        every: Steps from one renewal of the eigenvectors to the next.
        max_dim: A side that is longer is left as it is.
        stagger: Whether parameters take turns to be renewed, so that all steps are as long.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.
        blocks: The rows of fused matrices, each block with statistics of its own, as in
            `Orthogonalize`.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Graft, Modular, Shampoo
        >>> model = torch.nn.Linear(10, 5, bias=False)
        >>> opt = Modular(model.parameters(), Graft(Adam(), Shampoo()), LR(1e-3))

    Reference:
        Gupta et al., "Shampoo: preconditioned stochastic tensor optimization", arXiv 1802.09568;
        Shi et al., "A distributed data-parallel PyTorch implementation of the distributed Shampoo
        optimizer", arXiv 2309.06497; facebookresearch/optimizers.
    """

    betas: Live[tuple[Share, Share]] = (0.9, 0.999)
    eps: Live[Positive] = 1e-12
    exponent: Live[Annotated[float, Within(above=0, at_most=1)]] = 0.25
    every: Count = 10
    max_dim: Whole = 10000
    stagger: bool = False
    stacks: bool | None = None
    blocks: Blocks = None

    batched = True
    rows_of = rows_with_bases
    impure = PRODUCTS

    def check(self) -> None:
        super().check()
        check_blocks(self)

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        made = {"step": torch.zeros(1), "exp_avg": torch.zeros(rows, columns)}
        for side, n in sides_up_to(self, rows, columns).items():
            made |= {
                side: torch.zeros(n, n),
                f"{side}_basis": torch.eye(n),
                f"{side}_values": torch.ones(n),
            }
        return made

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        beta1, beta2 = group["betas"]
        averaged = average(state["exp_avg"], u.clone(), 1 - beta1)
        made = {"step": state["step"] + 1, "exp_avg": averaged}
        for side in [side for side in SIDES if side in state]:
            rows = u if side == "left" else u.mT
            made[side] = average(state[side], gram(rows), 1 - beta2)
        return made

    def refresh_matrix(self, state: MatrixState, group: Group) -> MatrixState:
        weight = 1 - group["betas"][1] ** state["step"]
        made: MatrixState = {}
        for side in [side for side in SIDES if side in state]:
            matrix, old = state[side] / weight.unsqueeze(-1), state[f"{side}_basis"]
            basis = eigenvectors(matrix) if group["first"] else sorted_after(matrix, old)
            made |= {f"{side}_basis": basis, f"{side}_values": eigenvalues(matrix, basis)}
        return made

    def update_tensor(self, u: Tensor, state: MatrixState, group: Group) -> Tensor:
        weight = 1 - group["betas"][0] ** state["step"]
        m = into(state["exp_avg"] / weight.unsqueeze(-1), state)
        for side, dim in SIDES.items():
            if side in state:
                values = state[f"{side}_values"].clamp(min=0) + group["eps"]
                m = m.mul_((values ** -group["exponent"]).unsqueeze(-3 - dim))
        return back(m, state)
