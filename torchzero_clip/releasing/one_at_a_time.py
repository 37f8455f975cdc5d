"""The class `OneAtATime`: a compiled engine for parameters that are updated one at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from torchzero_clip.core.engine import Session
from torchzero_clip.engines import Compiled

WHY_NOT_REPLAYED = (
    "release updates each parameter separately, in the order in which autograd computes gradients"
)


class OneAtATime(Compiled):
    """A compiled engine for one tensor at a time. All tensors use the same memory in turn."""

    def __repr__(self) -> str:
        return "OneAtATime()"

    def open(
        self,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> Session:
        kind = (params[0].device, params[0].dtype)  # tensors of one kind share memory
        return super().open(kind, list(range(len(places))), params, grads)

    def says(self, besides: Sequence[str]) -> list[str]:
        return super().says([*besides, WHY_NOT_REPLAYED])
