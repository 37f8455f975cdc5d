"""SkipSpike: a guard that skips steps if the gradient norm or the loss is an outlier."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Count, Threshold, Whole, Within
from torchzero_clip.core.norms.numeric import safe_scale
from torchzero_clip.modules.flow.step_guard import LOSS, NONFINITE, SPIKE, _Seen, _StepGuard

TIE = 1e-12  # as a share of the mean: a smaller standard deviation comes from rounding alone


class SkipSpike(_StepGuard):
    """A guard against spikes: skips the step if the gradient norm or the loss is an outlier.

    Use it as the first link for the pretraining of large language models. The guard skips a step if
    x - mean > sigmas · std. Here x is the global gradient norm, and mean and std are computed from
    the last `window` values of x. The guard applies the same test to the loss if
    `opt.report(loss=loss)` or a closure provides the loss.

    The standard deviation is unbiased. If the standard deviation is 0, there is no limit. The guard
    also skips the step if the norm or the loss is NaN or infinite. The guard does not synchronize
    with the GPU.

    Args:
        window: The number of past values that the guard stores. Default: 128.
        sigmas: The limit: x may be at most this number of standard deviations above the mean.
            Default: 6.0.
        least: The guard skips no step before it has stored this number of values. Default: 64.
        patience: After `patience` skipped steps in a row, the guard also stores the values of
            skipped steps. The limit then follows a lasting change. Default: 20.
        keep_skipped: If True, the guard always stores the values of skipped steps, as OLMo does.
            Default: False.
        max_consecutive: Raise `RuntimeError` after `max_consecutive` skipped steps in a row. The
            guard reads the count only every `max_consecutive` steps, so the error may come up to
            `max_consecutive - 1` steps late. None never raises. Default: None.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, SkipSpike
        >>> model = torch.nn.Linear(10, 1)
        >>> opt = Modular(model.parameters(), SkipSpike(), ClipNorm(1.0), Adam(), LR(1e-3))
        >>> loss = model(torch.randn(64, 10)).square().mean()
        >>> loss.backward()
        >>> opt.report(loss=loss)
        >>> opt.step()

    Reference:
        OLMo et al., "2 OLMo 2 Furious", arXiv 2501.00656, whose code has it as SkipStepOptimizer.
    """

    window: Annotated[int, Within(at_least=2)] = 128
    sigmas: Live[Threshold] = 6.0
    least: int = 64
    patience: Whole = 20
    keep_skipped: bool = False
    max_consecutive: Count | None = None

    judges_loss = True
    clips = True
    reason = "spikes"
    pure = True

    def check(self) -> None:
        super().check()
        self.require("least", at_least=2, at_most=self.window, integer=True)

    def init_unit(self) -> dict[str, Any]:
        empty = torch.full((self.window,), math.nan, dtype=torch.float32, device="cpu")
        return {**super().init_unit(), "norms": empty, "losses": empty.clone()}

    def judge(self, seen: _Seen, state: UnitState, group: Group) -> Tensor:
        norm = seen.norm
        loss = seen.loss
        why = torch.where(self._spikes(norm, state["norms"], group["sigmas"]), SPIKE, 0)
        broken = ~torch.isfinite(norm)
        if loss is not None and seen.has_loss is not None:
            loss_spikes = self._spikes(loss, state["losses"], group["sigmas"])
            why = torch.where(loss_spikes & (why == 0), LOSS, why)
            broken = broken | (seen.has_loss & ~torch.isfinite(loss))
        return torch.where(broken, NONFINITE, why)

    def _spikes(self, x: Tensor, values: Tensor, sigmas: Any) -> Tensor:
        """Return whether x is too far above the mean of `values`. NaN means "not set yet"."""
        known = values.isfinite()
        values = values.where(known, 0)
        scale = safe_scale(values.abs().amax(dim=-1, keepdim=True))  # squares must not overflow
        count = known.sum(dim=-1)
        values = values / scale
        mean = values.sum(dim=-1) / count
        deviations = (values - mean.unsqueeze(-1)).where(known, 0)
        std = (deviations.square().sum(dim=-1) / (count - 1)).sqrt()
        limited = (count >= self.least) & (std > TIE * mean.abs())
        return limited & (x / scale[:, 0] - mean > sigmas * std)

    def remember(self, seen: _Seen, bad: Tensor, state: UnitState) -> UnitState:
        enters = ~bad | (state["consecutive"] > self.patience) | self.keep_skipped
        remembered = {"norms": _pushed(state["norms"], seen.norm, enters)}
        if seen.loss is not None:
            remembered["losses"] = _pushed(state["losses"], seen.loss, enters)
        return remembered


def _pushed(values: Tensor, x: Tensor, enters: Tensor) -> Tensor:
    """Return the values with x in place of the oldest, if `enters` is True and x is finite."""
    moved = torch.cat([values[:, 1:], x.to(values.dtype).unsqueeze(1)], dim=1)
    return torch.where((enters & x.isfinite()).unsqueeze(1), moved, values)
