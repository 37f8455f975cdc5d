"""Shampoo: a momentum that is whitened on both sides of the matrix."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, TensorwiseTransform
from torchzero_clip.core.bounds import Count, Positive, Share, Whole, Within
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.core.tensor_kinds import wide
from torchzero_clip.modules.matrices.batches import PRODUCTS
from torchzero_clip.modules.matrices.eigenbases import (
    SIDES,
    average,
    back,
    eigenvalues,
    eigenvectors,
    gram,
    into,
    matrices_with_bases,
    sides_up_to,
    sorted_after,
)
from torchzero_clip.modules.matrices.whitening import at_least_tiny


class Shampoo(TensorwiseTransform):
    """Shampoo: momentum that is whitened by roots of the averages u uᵀ and uᵀ u of a matrix.

    Use it in `Graft`, as the authors do: `Graft(Adam(betas), Shampoo(betas))` (tested against
    facebookresearch/optimizers). The norm of a step then comes from `Adam`.

    L ← β₂ L + (1 - β₂) u uᵀ;   R ← β₂ R + (1 - β₂) uᵀ u;   u ← L⁻ᵖ m R⁻ᵖ

    Here m is the average of u, as in `Adam`. L⁻ᵖ is Q (λ + eps)⁻ᵖ Qᵀ. Here Q are the eigenvectors
    of L / (1 - β₂ᵗ), λ are the eigenvalues, and t is the step number. The first eigenvectors are
    exact. Every few steps, one power iteration and a QR decomposition refine them.

    Args:
        betas: The decay rate of m, and the decay rate of L and R. Default: (0.9, 0.999).
        eps: A small number that is added to the eigenvalues. Default: 1e-12.
        exponent: p, the exponent for each side. Default: 0.25.
        every: Renew the eigenvectors every `every` steps. Default: 10.
        max_dim: The longest side that is whitened. Default: 10000.
        stagger: If True, parameters renew their eigenvectors in different steps, so that all steps
            take equally long. Default: False.
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.

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
    layout: MatrixLayout = None

    batched = True
    matrices_of = matrices_with_bases
    impure = PRODUCTS

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        state = {"step": torch.zeros(1), "exp_avg": torch.zeros(rows, columns)}
        for side, n in sides_up_to(self, rows, columns).items():
            state[side] = torch.zeros(n, n)
            state[f"{side}_basis"] = torch.eye(n)
            state[f"{side}_values"] = torch.ones(n)
        return state

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        beta1, beta2 = group["betas"]
        m = average(state["exp_avg"], u.clone(), 1 - beta1)
        new = {"step": state["step"] + 1, "exp_avg": m}
        for side in [side for side in SIDES if side in state]:
            rows = u if side == "left" else u.mT
            new[side] = average(state[side], gram(rows), 1 - beta2)
        return new

    def refresh_matrix(self, state: MatrixState, group: Group) -> MatrixState:
        # the step number stays 0 if the first gradient has NaN, and eigh would raise for 0 / 0
        weight = at_least_tiny(1 - group["betas"][1] ** state["step"])
        new: MatrixState = {}
        for side in [side for side in SIDES if side in state]:
            matrix = state[side] / weight.unsqueeze(-1)
            if group["first"]:
                basis = eigenvectors(matrix)
            else:
                basis = sorted_after(matrix, state[f"{side}_basis"])
            new[f"{side}_basis"] = basis
            new[f"{side}_values"] = eigenvalues(matrix, basis)
        return new

    def update_tensor(self, u: Tensor, state: MatrixState, group: Group) -> Tensor:
        weight = 1 - group["betas"][0] ** state["step"]
        m = into(state["exp_avg"] / weight.unsqueeze(-1), state)
        for side, dim in SIDES.items():
            if side in state:
                values = state[f"{side}_values"].clamp(min=0) + group["eps"]
                # torch's pow in float32 depends on the place of an element in its tensor
                roots = values.to(wide(values.device)) ** -group["exponent"]
                m = m.mul_(roots.to(m.dtype).unsqueeze(-3 - dim))
        return back(m, state)
