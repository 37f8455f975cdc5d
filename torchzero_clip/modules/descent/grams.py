"""Grams: the size of the update, with the sign of the gradient."""

from __future__ import annotations

from torchzero_clip.core import Group, State, TensorList, Transform


class Grams(Transform):
    """u ← |u| · sign(g)

    Put it after an optimizer such as Adam: how far an entry moves is the average's, which way is
    today's gradient's.

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
        signs = group["grads"].to(u.dtype).sign()  # before u, which may be the gradient, is written
        return u.abs_().mul_(signs)
