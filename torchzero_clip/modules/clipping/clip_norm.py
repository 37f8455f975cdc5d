"""ClipNorm: a rule that limits the norm."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import Threshold


class ClipNorm(NormRule):
    """Norm clipping: scales the update down if its norm is larger than `max_norm`.

    Use it if you know a good threshold. The direction of the update does not change.

    u ← u · min(1, max_norm / ‖u‖)

    Here u is the update that the rule receives. For the first rule of a chain, u is the gradient.
    By default each tensor has its own norm. With `dim="global"` all tensors share one norm, as in
    `torch.nn.utils.clip_grad_norm_` (tested against torch).

    If the norm is NaN, the result is NaN as well. `Guard` skips such a step.

    Args:
        max_norm: The largest norm allowed. 0 gives zeros, and `math.inf` never clips.
        ord: The norm to measure: a number such as 2, or a name such as "l1", "linf", "rms", "std"
            or "mad". Default: 2.
        dim: The elements that share one norm. With None, each tensor has its own norm. With an int
            or several ints, each slice along these dims has its own norm. With "layer", "group" or
            "global", one norm covers all tensors of a layer, all tensors of a parameter group, or
            all tensors on all ranks. Default: None.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))

    Reference:
        Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks",
        arXiv 1211.5063.
    """

    max_norm: Live[Threshold]
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    limit_is = "max_norm"
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return group["max_norm"]
