"""Lambda: a rule that applies a function to every tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from torchzero_clip.core import Group, TensorwiseTransform


class Lambda(TensorwiseTransform):
    """Lambda applies a function to the update, one tensor at a time.

    Use it for a quick experiment. A custom `Transform` class with an `update` method is faster,
    because it works on all tensors at once and can be compiled.

    u ← fn(u), one tensor at a time

    Args:
        fn: A function that receives one tensor and returns a tensor of the same shape. It may
            change its argument in place. Call `u.reshape(...)`, not `u.view(...)`, because the
            strides of the tensor may vary.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Lambda, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Lambda(lambda u: u.tanh()), LR(1e-2))
    """

    fn: Callable[[Tensor], Tensor]

    impure = (
        "fn can be any function: write a Transform with pure = True whose update calls methods of "
        "TensorList, such as u.tanh()"
    )

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        return self.fn(u)
