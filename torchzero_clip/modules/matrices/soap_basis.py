"""SOAPBasis: the eigenvectors of the averages u uᵀ and uᵀ u of a matrix."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorwiseTransform
from torchzero_clip.core.bounds import Count, Share, Whole
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices.batches import PRODUCTS
from torchzero_clip.modules.matrices.eigenbases import (
    SIDES,
    average,
    eigenvectors,
    gram,
    matrices_with_bases,
    sides_up_to,
    sorted_after,
    sorted_before,
    unsorted,
)


class SOAPBasis(TensorwiseTransform):
    """The bases of SOAP: eigenvectors of the averages u uᵀ and uᵀ u of a matrix.

    Use it as the first link in `InBasis`. Outside of `InBasis`, this rule does not change u.

    L ← β L + (1 - β) u uᵀ;   R ← β R + (1 - β) uᵀ u;   Qₗ, Qᵣ their eigenvectors, nearly

    The first bases are exact. Every few steps, the rule refines them: it computes L Qₗ (one power
    iteration) and a QR decomposition of the result. The columns are sorted by their eigenvalues.

    Args:
        beta: The decay rate of the averages. None uses the second value of `betas` of the nearest
            link that has `betas`, such as the `Adam` after this link. Default: 0.95.
        every: Renew the bases every `every` steps. Default: 10.
        first: What to do with the first gradient of a parameter. With "skip", as in the authors'
            code, the first gradient only makes the bases. Bases are renewed after a step. With
            "step", as in NVIDIA's code, the first gradient updates the parameter. Bases are renewed
            before a step. With "use", as in modded-nanogpt, the first gradient makes the bases and
            updates the parameter. Bases are renewed after each `every`-th step, and columns are not
            sorted. Default: "skip".
        max_dim: The longest side that has a basis. A longer side is not rotated. Default: 10000.
        stagger: If True, different parameters renew their bases in different steps, so that all
            steps take equally long. Default: False.
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

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
    layout: MatrixLayout = None

    borrows = (("beta", "betas", 1),)
    batched = True
    matrices_of = matrices_with_bases
    impure = PRODUCTS

    def is_due(self, step: int) -> bool:
        return super().is_due(step + (self.first == "use"))

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        state: MatrixState = {}
        for side, n in sides_up_to(self, rows, columns).items():
            state[side] = torch.zeros(n, n)
            state[f"{side}_basis"] = torch.eye(n)
        return state

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        rate = 1 - group["beta"]
        new: MatrixState = {}
        for side in [side for side in SIDES if side in state]:
            rows = u if side == "left" else u.mT
            new[side] = average(state[side], gram(rows), rate)
        return new

    def refresh_matrix(self, state: MatrixState, group: Group) -> MatrixState:
        return self.refreshed(state, group)[0]

    def refreshed(self, state: MatrixState, group: Group) -> tuple[MatrixState, dict[int, Tensor]]:
        """Return the state with new bases, and the new order of second moments along each dim."""
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
