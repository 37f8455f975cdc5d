"""ClipRMS: a rule that limits the root mean square."""

from __future__ import annotations

from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import Threshold


class ClipRMS(NormRule):
    """RMS clipping: scales the update down if its root mean square is larger than `max_rms`.

    Unlike the norm, the root mean square does not grow with the number of elements, so one
    threshold fits tensors of all sizes.

    u ← u / max(1, RMS(u) / max_rms)

    Adafactor clips u / √v in this way, before momentum. If you put `ClipRMS` after `Adam`, the rule
    clips an update that contains the momentum. That differs from Adafactor and StableAdamW.

    Args:
        max_rms: The largest root mean square allowed. Default: 1.0.
        dim: The elements that share one root mean square, with the same choices as in `ClipNorm`.
            Default: None, one root mean square per tensor.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 1.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipRMS, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), ClipRMS(1.0), LR(1e-3))

    Reference:
        Shazeer, Stern, "Adafactor: Adaptive learning rates with sublinear memory cost",
        arXiv 1804.04235; Wortsman et al., arXiv 2304.13013.
    """

    max_rms: Live[Threshold] = 1.0
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1

    ord = "rms"
    limit_is = "max_rms"
    pure = True

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        return group["max_rms"]
