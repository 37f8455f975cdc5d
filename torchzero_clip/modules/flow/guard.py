"""Guard: what happens to a step with NaN or infinite gradients."""

from __future__ import annotations

from typing import Literal

import torch

from torchzero_clip.core import Bucket
from torchzero_clip.core.norms import largest
from torchzero_clip.modules.flow.step_guard import _StepGuard, anywhere


class Guard(_StepGuard):
    """Skip the step (or zero the entries, or raise) where a gradient is NaN or infinite

    It stands first. A skipped step leaves parameters, state and step counts of all other links as
    they were; only `metrics()["Guard/skipped"]` moves. All ranks agree. "skip" and "raise" read one
    number on the host each step; "zero" does not.

    Args:
        on_nonfinite: "skip", "zero" or "raise", which names the parameters.
        max_consecutive: Raise after so many skipped steps in a row, or None.

    Example:
        >>> opt = Modular(model.parameters(), Guard(), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    on_nonfinite: Literal["skip", "zero", "raise"] = "skip"
    max_consecutive: int | None = None

    @property
    def passes_gradient(self) -> bool:  # type: ignore[override] # here it depends on an argument
        return self.on_nonfinite != "zero" or self.target == "grad"

    def check(self) -> None:
        super().check()
        self.require_one_of("on_nonfinite", ("skip", "zero", "raise"))
        self.require("max_consecutive", at_least=1, integer=True, optional=True)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        if self.on_nonfinite == "zero":
            for bucket in buckets:
                bucket.u = bucket.u.where(bucket.u.isfinite(), 0.0)
            return buckets
        bad = ~torch.isfinite(torch.cat([largest(bucket.u.tensors) for bucket in buckets]))
        if not anywhere(bad.any()):
            return self.passed(buckets)
        if self.on_nonfinite == "raise":
            names = [
                name or f"parameter {place} of group {bucket.index}"
                for bucket in buckets
                for name, place in zip(bucket.names, bucket.places, strict=True)
            ]
            wrong = [name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad]
            raise RuntimeError(f"Guard: NaN or infinite gradients in {wrong or 'another rank'}")
        return self.skipped(buckets, "NaN or infinite gradients")
