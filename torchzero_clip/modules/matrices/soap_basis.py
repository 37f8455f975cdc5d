"""SOAPBasis: the eigenvectors of both averages u uᵀ and uᵀ u of a matrix."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorwiseTransform
from torchzero_clip.core.bounds import Count, Share, Whole
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices.batches import PRODUCTS
from torchzero_clip.modules.matrices.blocks import Blocks, check_blocks
from torchzero_clip.modules.matrices.eigenbases import (
    SIDES,
    average,
    eigenvectors,
    gram,
    rows_with_bases,
    sides_up_to,
    sorted_after,
    sorted_before,
    unsorted,
)


class SOAPBasis(TensorwiseTransform):
    """L ← β L + (1 - β) u uᵀ;   R ← β R + (1 - β) uᵀ u;   Qₗ, Qᵣ their eigenvectors, nearly

    It stands in `InBasis`; by itself it leaves u as it is. The first bases are exact. After that
    every few steps bring them nearer, by one power iteration, L Qₗ, and its QR decomposition, with
    columns in the order of their eigenvalues.

    Args:
        beta: How much of the averages stays; None as the second of `betas` of the nearest link that
            has some, as the `Adam` behind it.
        every: Steps from one renewal of the bases to the next.
        first: "skip" as the authors' code: the first gradient of a parameter only makes the bases,
            and bases are renewed after the step. "step" as NVIDIA's: the first gradient is used,
            and bases are renewed before the step. "use" as in modded-nanogpt: the first gradient
            makes the bases and is used, and they are renewed after each `every`-th step, columns
            in place.
        max_dim: A side that is longer has no basis, and stays as it is.
        stagger: Whether parameters take turns to be renewed, so that all steps are as long.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.
        blocks: The rows of fused matrices, each block with bases of its own, as in `Orthogonalize`.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, InBasis, Modular, SOAPBasis
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), InBasis(SOAPBasis(), Adam()), LR(3e-3))

    Reference:
        Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", arXiv 2409.11321;
        nikhilvyas/SOAP; NVIDIA-NeMo/Emerging-Optimizers.
    """

    beta: Live[Share | None] = 0.95
    every: Count = 10
    first: Literal["skip", "step", "use"] = "skip"
    max_dim: Whole = 10000
    stagger: bool = False
    stacks: bool | None = None
    blocks: Blocks = None

    borrows = (("beta", "betas", 1),)
    batched = True
    rows_of = rows_with_bases
    impure = PRODUCTS

    def check(self) -> None:
        super().check()
        check_blocks(self)

    def is_due(self, step: int) -> bool:
        return super().is_due(step + (self.first == "use"))

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        made: MatrixState = {}
        for side, n in sides_up_to(self, rows, columns).items():
            made |= {side: torch.zeros(n, n), f"{side}_basis": torch.eye(n)}
        return made

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        new = {"left": lambda: gram(u), "right": lambda: gram(u.mT)}
        rate = 1 - group["beta"]
        return {x: average(state[x], new[x](), rate) for x in SIDES if x in state}

    def refresh_matrix(self, state: MatrixState, group: Group) -> MatrixState:
        return self.refreshed(state, group)[0]

    def refreshed(self, state: MatrixState, group: Group) -> tuple[MatrixState, dict[int, Tensor]]:
        """New bases, and for each dim the order in which second moments follow."""
        bases: MatrixState = {}
        orders: dict[int, Tensor] = {}
        for side, dim in SIDES.items():
            if side in state:
                old = state[f"{side}_basis"]
                if group["first"]:
                    new = eigenvectors(state[side])
                elif self.first == "step":
                    new = sorted_after(state[side], old)
                elif self.first == "use":
                    new = unsorted(state[side], old)
                else:
                    new, orders[dim] = sorted_before(state[side], old)
                bases[f"{side}_basis"] = new
        return bases, orders

    def update_tensor(self, u: Tensor, state: MatrixState, group: Group) -> Tensor:
        return u
