"""SkipLarge: no step where the gradients are too large."""

from __future__ import annotations

from torchzero_clip.core import Bucket, Live
from torchzero_clip.core.combine import total_norm
from torchzero_clip.modules.flow.step_guard import _StepGuard, anywhere


class SkipLarge(_StepGuard):
    """Skip the step where the norm of all gradients is above max_norm, or is no number

    It stands first, or next to another guard, and reads one number on the host each step.

    Args:
        max_norm: The largest norm of a step that happens.
        max_consecutive: Raise after so many skipped steps in a row, or None.

    Example:
        >>> opt = Modular(model.parameters(), SkipLarge(100.0), Adam(), LR(1e-3))
    """

    max_norm: Live[float]
    max_consecutive: int | None = None

    def check(self) -> None:
        super().check()
        self.require("max_norm", at_least=0)
        self.require("max_consecutive", at_least=1, integer=True, optional=True)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        norm = total_norm(buckets, [bucket.u for bucket in buckets])
        if anywhere(~(norm <= buckets[0].group["max_norm"])):
            return self.skipped(buckets, f"norms above {buckets[0].group['max_norm']}")
        return self.passed(buckets)
