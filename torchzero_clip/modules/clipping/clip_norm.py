"""ClipNorm: the norm at most max_norm."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative


class ClipNorm(NormRule):
    """u ← u · min(1, max_norm / ‖u‖)

    Args:
        max_norm: The largest norm allowed; 0 gives zeros, inf never clips.
        ord: Which norm: a number, or "l1", "linf", "std", "mad" and the like.
        dim: What is measured together: `None` each tensor, an int or several ints each slice along
            these dims, "layer", "group", or "global" for all tensors at once, which is what
            `torch.nn.utils.clip_grad_norm_` does (tested against torch).
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))

    Reference:
        Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks",
        arXiv 1211.5063.
    """

    max_norm: Live[NonNegative]
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    limit_is = "max_norm"
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return group["max_norm"]
