"""KLBasis: eigenvectors of averages that each side takes of what the other side whitened."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from torchzero_clip.core import Group
from torchzero_clip.core.bounds import Positive, Within
from torchzero_clip.core.stacks import MatrixState
from torchzero_clip.modules.matrices.eigenbases import (
    SIDES,
    average,
    eigenvectors,
    gram,
    into,
    sides_up_to,
    unsorted,
)
from torchzero_clip.modules.matrices.soap_basis import SOAPBasis

LEAST = 10  # the weight that any direction of the other side may have
OTHER = {"left": "right", "right": "left"}


class KLBasis(SOAPBasis):
    """L ← β L + (1 - β) u R⁻¹ uᵀ / columns;   R ← β R + (1 - β) uᵀ L⁻¹ u / rows;   Qₗ, Qᵣ as there

    It stands in `InBasis` in the place of `SOAPBasis`, and the two with `Adam` are KL-SOAP
    (tested against yorkerlin/KL-Methods). L⁻¹ is Qₗ diag(1 / λ) Qₗᵀ, whose λ are averages of their
    own, kept in every step: of the squares of the update in both bases, whitened by the other side.

    Args:
        beta: How much of the averages stays; None as the second of `betas` of the nearest link that
            has some, as the `Adam` behind it.
        every: Steps from one renewal of the bases to the next, by one power iteration and its QR
            decomposition; columns keep their places.
        first: "skip" as the authors' code: the first gradient of a parameter only makes the bases,
            which learn from others after they were used. "step": the first gradient is used, and
            bases learn before. "use": it is used, and bases learn from others after they were used.
        max_dim: A side that is longer has no basis, and whitens nothing.
        stagger: Whether parameters take turns to be renewed, so that all steps are as long.
        stacks: Whether tensors of three dims are a stack of matrices (True) or (first, rest).
            Tensors of more dims are one matrix (first, rest), or an error with True.
        blocks: The rows of fused matrices, each block with bases of its own, as in `Orthogonalize`.
        initial: The λ to begin with.
        most: 1 / √λ is at most this, at most the length of the side, and at least 10.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, InBasis, KLBasis, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), InBasis(KLBasis(), Adam()), LR(3e-3))

    Reference:
        Lin et al., "Understanding and improving Shampoo and SOAP via Kullback-Leibler
        minimization", arXiv 2509.03378; yorkerlin/KL-Methods.
    """

    initial: Positive = 0.1
    most: Annotated[int, Within(at_least=LEAST)] = 4000

    batched = True

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        sides = sides_up_to(self, rows, columns)
        values = {f"{side}_values": torch.ones(n) for side, n in sides.items()}
        return {**super().init_matrix(rows, columns), **values}

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        rate = 1 - group["beta"]
        turned = group["turned"] if "turned" in group else into(u, state)
        squares = turned.square()
        new: MatrixState = {}
        for side in [side for side in SIDES if side in state]:
            each = squares if side == "left" else squares.mT
            white = _whitened(u if side == "left" else u.mT, OTHER[side], state)
            rows, columns = white.shape[-2:]
            new[side] = average(state[side], gram(white).div_(columns), rate)
            weights = torch.ones_like(each[..., :1, :])
            if OTHER[side] in state:
                weights = weights / state[f"{OTHER[side]}_values"].unsqueeze(-2)
            now = (each @ weights.mT).squeeze(-1) / columns
            least = 1 / max(LEAST, min(rows, self.most)) ** 2
            values = average(state[f"{side}_values"], now, rate)
            new[f"{side}_values"] = values.clamp_(min=least)
        return new

    def refreshed(self, state: MatrixState, group: Group) -> tuple[MatrixState, dict[int, Tensor]]:
        new: MatrixState = {}
        for side in [side for side in SIDES if side in state]:
            if group["first"]:
                new[f"{side}_basis"] = eigenvectors(state[side])
                new[f"{side}_values"] = torch.full_like(state[f"{side}_values"], self.initial)
            else:
                new[f"{side}_basis"] = unsorted(state[side], state[f"{side}_basis"])
        return new, {}


def _whitened(rows: Tensor, side: str, state: MatrixState) -> Tensor:
    """The matrix in the basis of its columns, each divided by the root of its λ."""
    if side not in state:
        return rows
    roots = state[f"{side}_values"].rsqrt().unsqueeze(-2)
    return (rows @ state[f"{side}_basis"]).mul_(roots)
