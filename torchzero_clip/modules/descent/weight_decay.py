"""WeightDecay: pull the parameters towards zero."""

from __future__ import annotations

from typing import Any

from torchzero_clip.core import Group, Live, State, TensorList, Transform


class WeightDecay(Transform):
    """u ← u + weight_decay · w

    Its place says which kind: before Adam it is coupled, L2 regularisation {identity: adam};
    between Adam and LR it is decoupled, as in AdamW {identity: adamw}.

    Args:
        weight_decay: How much of the parameter joins the update.

    Example:
        >>> opt = Modular(model.parameters(), Adam(), WeightDecay(0.01), LR(1e-3))

    Reference:
        Loshchilov, Hutter, "Decoupled weight decay regularization", arXiv 1711.05101.
    """

    weight_decay: Live[float]

    def check(self) -> None:
        super().check()
        self.require("weight_decay", at_least=0)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.add_(group["params"], alpha=group["weight_decay"])

    def affine(self, group: Group) -> tuple[Any, Any]:
        return 1.0, group["weight_decay"]
