"""TrustRatio: a rule that makes the norm of the update proportional to the norm of the weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import NonNegative, Threshold


class TrustRatio(NormRule):
    """Layer-wise adaptive rates: scales the norm of an update to a multiple of the weight norm.

    Use it for training with very large batches.

    u ← u · min(max(coefficient · ‖w‖ / ‖u‖, low), high), and u where either norm is zero

    After `Adam` and `WeightDecay`, this rule makes LAMB (tested against optax). LARS is the chain
    of `WeightDecay`, `TrustRatio`, `LR` and then `Momentum` (tested against optax).

    Args:
        coefficient: The ratio of the norm of the update to the norm of the weight. Default: 1.0.
        dim: The elements that share one norm, with the same choices as in `ClipNorm`.
            Default: None, one norm per tensor.
        inverse_dims: If True, a slice covers all dims except the dims in `dim`. Default: False.
        min_size: Tensors or slices with fewer elements than `min_size` pass unchanged. Default: 1.
        bounds: The range (low, high) of the factor that multiplies the update.
            Default: (0.0, math.inf).

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Modular, TrustRatio, WeightDecay
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), Adam(), WeightDecay(0.01), TrustRatio(), LR(1e-3))

    Reference:
        You et al., "Large batch training of convolutional networks", arXiv 1708.03888, and
        "Large batch optimization for deep learning", arXiv 1904.00962; Fong et al., "Improving
        layer-wise adaptive rate methods using trust ratio clipping", arXiv 2011.13584.
    """

    coefficient: Live[NonNegative] = 1.0
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 1
    bounds: Live[tuple[Threshold, Threshold]] = (0.0, math.inf)

    sets_norm = True
    leaves = "own"
    clips = False
    pure = True

    def check(self) -> None:
        super().check()
        low, high = self.bounds
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return  # reading a tensor would synchronize with the device
        if low > high or low == math.inf:
            raise ValueError(
                "TrustRatio: bounds= must be a pair (low, high) with low finite and at most high, "
                f"got {self.bounds!r}"
            )

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        weight_norm = self.measure(group["params"])
        low, high = group["bounds"]
        limit = group["coefficient"] * weight_norm
        ratio = limit / norm
        factor = ratio.clamp(min=low).clamp(max=high)
        # an infinite norm has the ratio 0, which the lower bound must not raise
        bounded = (factor != ratio) & torch.isfinite(norm)
        limit = torch.where(bounded, factor * norm, limit)
        return torch.where(weight_norm > 0, limit, norm)
