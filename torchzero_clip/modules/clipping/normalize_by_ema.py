"""NormalizeByEMA: the norm of a moving average for every update."""

from __future__ import annotations

from torchzero_clip.modules.clipping.clip_norm_by_ema import ClipNormByEMA


class NormalizeByEMA(ClipNormByEMA):
    """m ← β m + (1 - β) u;   u ← u · max(‖m‖, eps) / ‖u‖

    `ClipNormByEMA` that scales up as well as down.

    Args:
        beta: How much of the average is kept a step.
        ord: Which norm.
        eps: The smallest norm that the update gets.
        tensorwise: False for one norm of all tensors, the same as dim="global".
        max_ema_growth: The factor that ‖m‖ may grow by a step, or None.
        ema_init: Start the average at "zeros" or at the first "update" of the unit.
        dim: What is measured together, as in `ClipNorm`, without slices.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, NormalizeByEMA
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), NormalizeByEMA(0.9), LR(1e-2))
    """

    sets_norm = True
    pure = True
