"""AutoClip: a limit at the median plus three deviations, or at a percentile."""

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
    """u ← u · min(1, limit / ‖u‖), limit = median + 3 · std, or a percentile, of the raw norms so far

    In mode "auto" the deviation is that of all norms: after n steps a single spike of size s adds
    about s / √n to it, for good. In mode "percentile" a spike is forgotten when it leaves the window.

    Args:
        mode: "auto" or "percentile".
        percentile: Which one, in percent.
        history: Of "window" norms, or an "ema" that settles at the percentile.
        window_size: How many norms the window holds.
        ema_decay: How much the ema keeps a step.
        warmup_steps: How many norms are only observed first.
        dim: What is measured together: "global", "group", "layer", or None for each tensor.
        warmup: A rule that clips meanwhile, such as ClipNorm(1.0, dim="global"), or None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, AutoClip, Modular
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = AutoClip("percentile", percentile=90.0)
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))

    Reference:
        Seetharaman et al., "AutoClip: adaptive gradient clipping for source separation networks",
        arXiv 2007.14469.
    """  # noqa: E501

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
                f"{self.mode!r}: write AutoClip('percentile', percentile={self.mode!r})"
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
    """median + 3 · std, the median by P², the unbiased std by Welford's sums"""

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
