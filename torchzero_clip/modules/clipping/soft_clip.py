"""SoftClip: a rule that limits the norm smoothly."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import Threshold


class SoftClip(NormRule):
    """Smooth norm clipping: every norm is reduced, and large norms approach `max_norm`.

    Use it in place of `ClipNorm` if the new norm should depend smoothly on the old norm. Every
    update shrinks, but small updates shrink only a little.

    u ← u / (1 + ‖u‖ / max_norm)

    Args:
        max_norm: The norm that large updates approach.
        ord: The norm to measure: a number such as 2, or a name such as "l1", "linf", "rms", "std"
            or "mad". Default: 2.
        dim: The elements that share one norm, with the same choices as in `ClipNorm`.
            Default: None, one norm per tensor.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, SoftClip
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), SoftClip(1.0, dim="global"), Adam(), LR(1e-3))
    """

    max_norm: Live[Threshold]
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        bound = torch.zeros_like(norm) + group["max_norm"]
        return torch.where(torch.isinf(bound), bound, bound / (1 + bound / norm))
