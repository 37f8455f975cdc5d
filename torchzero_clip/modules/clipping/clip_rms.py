"""ClipRMS: the root mean square at most max_rms."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative


class ClipRMS(NormRule):
    """u ← u / max(1, RMS(u) / max_rms)

    Adafactor clips u / √v so, before its momentum. After Adam it measures an update that has the
    momentum in it, which neither Adafactor nor StableAdamW does.

    Args:
        max_rms: The largest root mean square allowed.
        dim: What is measured together, as in `ClipNorm`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipRMS, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), ClipRMS(1.0), LR(1e-3))

    Reference:
        Shazeer, Stern, "Adafactor: Adaptive learning rates with sublinear memory cost",
        arXiv 1804.04235; Wortsman et al., arXiv 2304.13013.
    """

    max_rms: Live[NonNegative] = 1.0
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    ord = "rms"
    limit_is = "max_rms"
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return group["max_rms"]
