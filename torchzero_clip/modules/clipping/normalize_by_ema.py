"""NormalizeByEMA: a rule that sets the norm to the norm of a moving average."""

from __future__ import annotations

from torchzero_clip.modules.clipping.clip_norm_by_ema import ClipNormByEMA


class NormalizeByEMA(ClipNormByEMA):
    """NormalizeByEMA scales every update, up or down, to the norm of an average of the updates.

    This rule is like `ClipNormByEMA`, but it also scales small updates up.

    m ← β m + (1 - β) u;   u ← u · max(‖m‖, eps) / ‖u‖

    Args:
        beta: The decay rate of the average m. Default: 0.99.
        ord: The norm to measure, as in `ClipNorm`. Default: 2.
        eps: The smallest norm of a result. Default: 1e-6.
        tensorwise: If False, all tensors share one norm, as with `dim="global"`. Default: True.
        max_ema_growth: The largest factor by which ‖m‖ grows per step, or None for no bound.
            Default: 1.5.
        ema_init: The first value of the average: "zeros", or "update" for the first update that the
            rule receives. Default: "zeros".
        dim: The tensors that share one norm: None for a separate norm per tensor, or "layer",
            "group" or "global". Slices are not supported. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, NormalizeByEMA
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), NormalizeByEMA(0.9), LR(1e-2))
    """

    sets_norm = True
    pure = True
