"""AutoClip: a rule that limits the norm. The limit is a statistic of past norms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from torch import Tensor

from torchzero_clip.core import Group, Live, NormRule, Scope, UnitState
from torchzero_clip.core.bounds import Count, Share, Within
from torchzero_clip.modules.adaptive.adaptive_rule import AdaptiveRule
from torchzero_clip.modules.adaptive.criterion import Criterion, none_yet
from torchzero_clip.modules.adaptive.ema_quantile import EMAQuantile
from torchzero_clip.modules.adaptive.p2_quantile import P2Quantile
from torchzero_clip.modules.adaptive.quantile import Quantile


class AutoClip(AdaptiveRule):
    """Automatic norm clipping: the limit follows the median or a percentile of the past norms.

    Use it if you don't know a good threshold, or if the norm may change to a new level for good.
    The statistics use raw norms (before clipping), so the limit follows such a change.

    u ← u · min(1, limit / ‖u‖),
    limit = median + 3 · std, or a percentile, of the raw norms so far

    In mode "auto" the limit is the median plus 3 standard deviations of all past norms. After n
    steps, a single spike of size s raises the limit by about 3 s / √n. The rule never forgets a
    spike. In mode "percentile" the limit is a percentile of the norms in a window. The rule forgets
    a spike when the spike leaves the window.

    Args:
        mode: "auto" or "percentile". Default: "auto".
        percentile: The percentile of mode "percentile", from 0 to 100. Default: 95.0.
        history: The norms that mode "percentile" uses: "window" for the last `window_size` norms,
            or "ema" for a running estimate that moves toward the percentile. Default: "window".
        window_size: The number of norms in the window. Default: 1024.
        ema_decay: The decay rate of the running estimate. Default: 0.99.
        warmup_steps: The number of norms that the rule observes before it clips. Default: 20.
        dim: The tensors that share one norm: "global", "group", "layer", or None for a separate
            norm per tensor. Default: "global".
        warmup: The rule that clips during the warm-up, such as `ClipNorm(1.0, dim="global")`, or
            None for no clipping. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AutoClip, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = AutoClip("percentile", percentile=90.0)
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))

    Reference:
        Seetharaman et al., "AutoClip: adaptive gradient clipping for source separation networks",
        arXiv 2007.14469.
    """

    mode: str = "auto"
    percentile: Live[Annotated[float, Within(at_least=0, at_most=100)]] = 95.0
    history: Literal["window", "ema"] = "window"
    window_size: Count = 1024
    ema_decay: Live[Share] = 0.99
    warmup_steps: int = 20
    dim: Scope = "global"
    warmup: NormRule | None = None

    pure = True

    def check(self) -> None:
        if isinstance(self.mode, (int, float)) and not isinstance(self.mode, bool):
            raise TypeError(
                "AutoClip: mode must be one of ['auto', 'percentile'], got "
                f"{self.mode!r}: did you mean AutoClip('percentile', percentile={self.mode!r})?"
            )
        self.require_one_of("mode", ("auto", "percentile"))
        judges = {"window": Quantile(0.95, self.window_size), "ema": EMAQuantile(0.95)}
        vars(self)["_judge"] = _MedianPlus() if self.mode == "auto" else judges[self.history]
        super().check()

    def judge(self) -> Criterion:
        return vars(self)["_judge"]

    def values(self, group: Group) -> Group:
        return {"q": group["percentile"] / 100, "alpha": group["ema_decay"]}


class _MedianPlus(Criterion):
    """A criterion: the median of all norms plus three standard deviations.

    The P² estimator gives the median, and Welford's sums give the unbiased standard deviation.
    """

    pure = True

    def init_unit(self) -> dict[str, Any]:
        return {**MEDIAN.init_unit(), "mean": 0.0, "spread": 0.0}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor:
        std = state["spread"] / (state["seen"] - 1).clamp(min=1).sqrt()
        median = MEDIAN.estimate(state, {"q": 0.5})
        return none_yet(median + 3 * std, std, state["mean"])

    def observe(self, norm: Tensor, state: UnitState, group: Group) -> UnitState:
        after = MEDIAN.observe(norm, state, {"q": 0.5})
        mean = state["mean"] + (norm - state["mean"]) / after["seen"]
        squares = state["spread"] ** 2 + (norm - state["mean"]) * (norm - mean)
        return {**after, "mean": mean, "spread": squares.sqrt()}


MEDIAN = P2Quantile(0.5)
