"""DeltaClip: a rule that limits the norm, but never multiplies by less than `delta`."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Ord, Scope, UnitState
from torchzero_clip.core.bounds import Fraction, Threshold


class DeltaClip(NormRule):
    """Norm clipping with a smallest factor: never multiplies an update by less than `delta`.

    Use it in place of `ClipNorm` if a very large gradient should still lead to a larger step. The
    paper proves convergence for wide networks.

    u ← u · min(1, max(delta, max_norm / ‖u‖))

    Args:
        max_norm: The largest norm that passes unchanged.
        delta: The smallest factor that the rule multiplies an update by. Default: 1e-3.
        ord: The norm to measure, as in `ClipNorm`. Default: 2.
        dim: The elements that share one norm, with the same choices as in `ClipNorm`.
            Default: None, one norm per tensor.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, DeltaClip, Modular, Momentum
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = DeltaClip(1.0, 1e-3, dim="global")
        >>> opt = Modular(model.parameters(), clip, Momentum(0.9), LR(0.1))

    Reference:
        Tucat et al., "Regularized gradient clipping provably trains wide and deep neural networks",
        arXiv 2404.08624.
    """

    max_norm: Live[Threshold]
    delta: Live[Fraction] = 1e-3
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        longest = (norm * group["delta"]).clamp(min=group["max_norm"])
        return torch.where(torch.isfinite(norm), longest, group["max_norm"])
