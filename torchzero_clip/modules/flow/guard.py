"""Guard and SkipLarge: steps that should not happen."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Live, Transform, count_step, keep_number
from torchzero_clip.core.norms import largest
from torchzero_clip.core.units import total_norm


class _StepGuard(Transform):
    """What the guards share: they stand first, count what they skip, and may give up."""

    goes_first = True
    produces = False

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        for name in ("skipped", "consecutive"):
            count_step(buckets, name, by=0)
        return buckets

    def passed(self, buckets: list[Bucket]) -> list[Bucket]:
        """Let the step happen."""
        keep_number(buckets, "consecutive", 0)
        buckets[0].record[buckets[0].bound.path] = {"skipped": count_step(buckets, "skipped", by=0)}
        return buckets

    def skipped(self, buckets: list[Bucket], why: str) -> list[Bucket]:
        """End the step and count it."""
        count, row = count_step(buckets, "skipped"), count_step(buckets, "consecutive")
        buckets[0].record[buckets[0].bound.path] = {"skipped": count}
        most: int | None = getattr(self, "max_consecutive", None)
        if most is not None and row >= most:
            raise RuntimeError(f"{type(self).__name__}: {row} steps in a row had {why}")
        return []


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

    def check(self) -> None:
        super().check()
        self.require_one_of("on_nonfinite", ("skip", "zero", "raise"))
        self.require("max_consecutive", at_least=1, integer=True, optional=True)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        if self.on_nonfinite == "zero":
            for bucket in buckets:
                bucket.u = bucket.entrywise(lambda u, _: u.where(u.isfinite(), 0.0), bucket.u, {})
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


def anywhere(flag: Tensor) -> bool:
    """Whether a flag is set on this rank or on another."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        flag = flag.to(torch.int32)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
