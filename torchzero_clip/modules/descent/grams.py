"""Grams: the magnitude of the update with the sign of the gradient."""

from __future__ import annotations

from torchzero_clip.core import Group, State, TensorList, Transform


class Grams(Transform):
    """Grams: the magnitude of the update, with the sign of the current gradient.

    Put it after an optimizer such as `Adam`. The optimizer decides how far an element moves. The
    current gradient decides the direction.

    u ← |u| · sign(g)

    Here g is the gradient.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Grams, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), Grams(), LR(1e-3))

    Reference:
        Cao et al., "Grams: gradient descent with adaptive momentum scaling", arXiv 2412.17107.
    """

    reads = ("grads",)
    pure = True
    per_entry = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        # u may share its memory with the gradient, so the signs are computed before u is written
        signs = group["grads"].to(u.dtype).sign()
        return u.abs_().mul_(signs)
