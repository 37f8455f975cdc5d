"""Lazy: a list that is computed when it is read; and Joined, several lists as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from torchzero_clip.core.tensorlist import TensorList


class Lazy(TensorList):
    """A list whose tensors are computed when they are first read. Write `compute`."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None
        self.owned = True
        self.workspace = None
        self.measure = None
        self.loans = None

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


class Joined(Lazy):
    """Borrowed lists as one, put together when it is read: `join` makes it of their tensors."""

    __slots__ = ("join", "lists")

    def __init__(
        self, lists: Sequence[TensorList], join: Callable[[Iterable[Tensor]], list[Tensor]] = list
    ) -> None:
        super().__init__()
        self.lists, self.join, self.owned = lists, join, False

    def __len__(self) -> int:
        return sum(map(len, self.lists))

    def compute(self) -> list[Tensor]:
        return self.join([t for some in self.lists for t in some])
