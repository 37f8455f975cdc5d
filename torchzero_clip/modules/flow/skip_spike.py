"""SkipSpike: no step where the gradients, or the loss, stand out from the last ones."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from torchzero_clip.core import Group, Live, UnitState
from torchzero_clip.core.bounds import Count, NonNegative, Whole, Within
from torchzero_clip.core.norms.numeric import safe_scale
from torchzero_clip.modules.flow.step_guard import LOSS, NONFINITE, SPIKE, _Seen, _StepGuard

TIE = 1e-12  # of the mean: a spread that rounding alone makes


class SkipSpike(_StepGuard):
    """Skip the step where x - mean > sigmas · std, of the x of the last steps that happened

    x is the norm of all gradients and, where `opt.report(loss=loss)` told it or a closure returned
    it, the loss; std is unbiased, and where it is 0 there is no limit. A norm or loss that is no
    number skips the step, too. The host waits for nothing.

    Args:
        window: How many values are remembered.
        sigmas: How far above the mean a step may be.
        least: How many values there must be before a step is skipped.
        patience: After so many skipped steps in a row their values are remembered as well, so that
            a lasting change of level is followed.
        keep_skipped: Remember the values of all skipped steps, as OLMo does.
        max_consecutive: Raise after so many skipped steps in a row, or None. The host looks once in
            as many steps, and so may be late by as many.

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
    sigmas: Live[NonNegative] = 6.0
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
        norm, loss = seen.norm, seen.loss
        why = torch.where(self._spikes(norm, state["norms"], group["sigmas"]), SPIKE, 0)
        broken = ~torch.isfinite(norm)
        if loss is not None and seen.told is not None:
            spikes = self._spikes(loss, state["losses"], group["sigmas"])
            why = torch.where(spikes & (why == 0), LOSS, why)
            broken = broken | (seen.told & ~torch.isfinite(loss))
        return torch.where(broken, NONFINITE, why)

    def _spikes(self, x: Tensor, values: Tensor, sigmas: Any) -> Tensor:
        """Whether x is too far above the mean of some values; NaN among them is none."""
        known = values.isfinite()
        values = values.where(known, 0)
        scale = safe_scale(values.abs().amax(dim=-1, keepdim=True))  # squares stay in range
        count, values = known.sum(dim=-1), values / scale
        mean = values.sum(dim=-1) / count
        away = (values - mean.unsqueeze(-1)).where(known, 0)
        std = (away.square().sum(dim=-1) / (count - 1)).sqrt()
        limited = (count >= self.least) & (std > TIE * mean.abs())
        return limited & (x / scale[:, 0] - mean > sigmas * std)

    def remember(self, seen: _Seen, bad: Tensor, state: UnitState) -> UnitState:
        enters = ~bad | (state["consecutive"] > self.patience) | self.keep_skipped
        kept = {"norms": _pushed(state["norms"], seen.norm, enters)}
        if seen.loss is not None:
            kept["losses"] = _pushed(state["losses"], seen.loss, enters)
        return kept


def _pushed(values: Tensor, x: Tensor, enters: Tensor) -> Tensor:
    """The last values with one more, which pushes out the oldest, where it is a number."""
    moved = torch.cat([values[:, 1:], x.to(values.dtype).unsqueeze(1)], dim=1)
    return torch.where((enters & x.isfinite()).unsqueeze(1), moved, values)
