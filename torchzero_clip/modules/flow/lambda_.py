"""Lambda: a function as a transform."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchzero_clip.core import Group, TensorwiseTransform


class Lambda(TensorwiseTransform):
    """u ← fn(u), one tensor at a time

    Args:
        fn: A function of one tensor; it may write it. The strides of the tensor depend on the
            engine: call `u.reshape(...)`, not `u.view(...)`.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Lambda, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Lambda(lambda u: u.tanh()), LR(1e-2))
    """

    fn: Callable[[Tensor], Tensor]

    impure = (
        "fn may be any function: write a rule whose update has the formula on lists, as u.tanh(), "
        "and which says pure = True"
    )

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return self.fn(u)
