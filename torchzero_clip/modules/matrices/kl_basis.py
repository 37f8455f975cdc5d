"""KLBasis: eigenvectors of averages of the update. Each average whitens the other side first."""

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

LEAST_BOUND = 10  # 1 / √λ may always be as large as this
OTHER_SIDE = {"left": "right", "right": "left"}


class KLBasis(SOAPBasis):
    """The bases of KL-SOAP: eigenvectors of averages u R⁻¹ uᵀ and uᵀ L⁻¹ u of a matrix.

    Use it in `InBasis` in place of `SOAPBasis`. With `Adam` as the next link, the method is KL-SOAP
    (tested against yorkerlin/KL-Methods).

    L ← β L + (1 - β) u R⁻¹ uᵀ / columns;   R ← β R + (1 - β) uᵀ L⁻¹ u / rows;   Qₗ, Qᵣ as there

    Here Qₗ and Qᵣ are eigenvectors of L and R, as in `SOAPBasis`. L⁻¹ stands for
    Qₗ diag(1 / λ) Qₗᵀ. In every step, the rule rotates the update into both bases, whitens the
    other side, and squares the result. The values λ are running averages of these squares.

    Args:
        beta: The decay rate of the averages. None uses the second value of `betas` of the nearest
            link that has `betas`, such as the `Adam` after this link. Default: 0.95.
        every: Renew the bases every `every` steps, by one power iteration and a QR decomposition.
            The columns are not sorted. Default: 10.
        first: What to do with the first gradient of a parameter. With "skip", as in the authors'
            code, the first gradient only makes the bases. With "use", it also updates the
            parameter. In both cases, the rule updates the averages with a later gradient after
            using the gradient. With "step", the first gradient updates the parameter, and the rule
            updates the averages with each gradient before using the gradient. Default: "skip".
        max_dim: The longest side that has a basis. A longer side is not whitened. Default: 10000.
        stagger: If True, different parameters renew their bases in different steps, so that all
            steps take equally long. Default: False.
        layout: The matrices in fused weights and stacks, as in `Orthogonalize`. Default: None.
        initial: The first value of all λ. Default: 0.1.
        most: The largest 1 / √λ. The length of the side is another limit, but the limit is never
            below 10. Default: 4000.

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
    most: Annotated[int, Within(at_least=LEAST_BOUND)] = 4000

    batched = True

    def init_matrix(self, rows: int, columns: int) -> MatrixState:
        sides = sides_up_to(self, rows, columns)
        values = {f"{side}_values": torch.ones(n) for side, n in sides.items()}
        return {**super().init_matrix(rows, columns), **values}

    def observe_matrix(self, u: Tensor, state: MatrixState, group: Group) -> MatrixState:
        rate = 1 - group["beta"]
        rotated = group["rotated"] if "rotated" in group else into(u, state)
        squares = rotated.square()
        new: MatrixState = {}
        for side in [side for side in SIDES if side in state]:
            other = OTHER_SIDE[side]
            side_squares = squares if side == "left" else squares.mT
            whitened = _whitened(u if side == "left" else u.mT, other, state)
            rows, columns = whitened.shape[-2:]
            new[side] = average(state[side], gram(whitened).div_(columns), rate)
            weights = torch.ones_like(side_squares[..., :1, :])
            if other in state:
                weights = weights / state[f"{other}_values"].unsqueeze(-2)
            new_values = (side_squares @ weights.mT).squeeze(-1) / columns
            smallest = 1 / max(LEAST_BOUND, min(rows, self.most)) ** 2
            values = average(state[f"{side}_values"], new_values, rate)
            new[f"{side}_values"] = values.clamp_(min=smallest)
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
    """Return the rows in the basis of the columns, each column divided by the root of its λ."""
    if side not in state:
        return rows
    roots = state[f"{side}_values"].rsqrt().unsqueeze(-2)
    return (rows @ state[f"{side}_basis"]).mul_(roots)
