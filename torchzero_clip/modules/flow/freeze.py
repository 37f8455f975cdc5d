"""Freeze: parameters that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchzero_clip.core import Bucket, Transform
from torchzero_clip.modules.flow.choice import split


class Freeze(Transform):
    """No update where where(name, p) holds

    Links after it do not see these parameters and keep no state for them.

    Args:
        where: Chooses parameters by name and value. To ask for the name is an error unless the
            optimizer was given `model.named_parameters()`.

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
    pure, asks = True, ("where",)

    def ways(self, name: str, param: Tensor) -> Sequence[int] | None:
        return None if self.where(name, param) else []

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        return split(buckets, self.where)[1]

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        return split(buckets, self.where)[1]
