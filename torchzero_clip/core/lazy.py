"""Lazy: a list that is computed when it is read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchzero_clip.core.tensorlist import TensorList


class Lazy(TensorList):
    """A list whose tensors are computed when they are first read. Write `compute`."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None
        self.owned, self.workspace, self.measure = True, None, None

    def compute(self) -> list[Tensor]:
        """The tensors, in memory that nobody else sees."""
        raise NotImplementedError(f"{type(self).__name__} has no compute")

    @property
    def pending(self) -> bool:
        """Whether nothing is computed yet."""
        return self._tensors is None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, computed now if they were not before."""
        if self._tensors is None:
            self._tensors = self.compute()
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
