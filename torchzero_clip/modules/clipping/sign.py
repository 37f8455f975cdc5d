"""Sign: only the direction of every entry."""

from __future__ import annotations

from torchzero_clip.core import Group, State, TensorList, Transform


class Sign(Transform):
    """u ← sign(u)

    Example:
        >>> opt = Modular(model.parameters(), Momentum(0.9), Sign(), LR(1e-4))

    Reference:
        Bernstein et al., "signSGD", arXiv 1802.04434.
    """

    complex = "refuse"

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.sign_()
