"""Freeze: a rule that drops the updates of some parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchzero_clip.core import Bucket, Transform
from torchzero_clip.modules.flow.choice import split


class Freeze(Transform):
    """Freeze drops the updates of some parameters, so these parameters do not change.

    A function chooses the parameters. Later links do not receive these parameters, and allocate no
    state for them.

    Args:
        where: A function `where(name, p)` of the name and value of a parameter. It returns True for
            the parameters to freeze. If the function uses the name, pass `model.named_parameters()`
            to the optimizer.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Freeze, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> frozen = Freeze(lambda name, p: name == "bias")
        >>> opt = Modular(model.named_parameters(), frozen, Adam(), LR(1e-3))
    """

    where: Callable[[str, Tensor], bool]

    leaves = "gradient"
    drops = True
    reach = "tensor"
    pure = True
    asks = ("where",)

    def ways(self, name: str, param: Tensor) -> Sequence[int] | None:
        return None if self.where(name, param) else []

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return split(buckets, self.where)[1]

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return split(buckets, self.where)[1]
