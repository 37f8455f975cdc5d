"""Lazy lists: `Lazy` is computed when it is first read, and `Joined` joins several lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from torchzero_clip.core.tensorlist import TensorList


class Lazy(TensorList):
    """A list whose tensors are computed when they are first read. Subclasses define `compute`."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: list[Tensor] | None = None
        self.owned = True
        self.workspace = None
        self.measure = None
        self.loans = None

    def compute(self) -> list[Tensor]:
        """Return the tensors, in memory that no other list uses."""
        raise NotImplementedError(f"{type(self).__name__} must define compute")

    @property
    def pending(self) -> bool:
        """Whether the tensors have not been computed yet."""
        return self._tensors is None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors. They are computed now unless they were computed before."""
        if self._tensors is None:
            self._tensors = self.compute()
        return self._tensors

    @tensors.setter
    def tensors(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)


class Joined(Lazy):
    """A list that joins several borrowed lists when it is first read.

    Args:
        lists: The lists.
        join: A function that returns the tensors of the joined list from the tensors of all lists.
    """

    __slots__ = ("join", "lists")

    def __init__(
        self, lists: Sequence[TensorList], join: Callable[[Iterable[Tensor]], list[Tensor]] = list
    ) -> None:
        super().__init__()
        self.lists = lists
        self.join = join
        self.owned = False

    def __len__(self) -> int:
        return sum(map(len, self.lists))

    def compute(self) -> list[Tensor]:
        return self.join([t for tensors in self.lists for t in tensors])
