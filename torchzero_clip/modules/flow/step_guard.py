"""What the guards share."""

from __future__ import annotations

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Transform, count_step, keep_number


class _StepGuard(Transform):
    """What the guards share: they stand first, count what they skip, and may give up."""

    goes_first = True
    passes_gradient = True

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        for name in ("skipped", "consecutive"):
            count_step(buckets, name, by=0)
        return buckets

    def passed(self, buckets: list[Bucket]) -> list[Bucket]:
        """Let the step happen."""
        keep_number(buckets, "consecutive", 0)
        buckets[0].step.record[buckets[0].bound.path] = {
            "skipped": count_step(buckets, "skipped", by=0)
        }
        return buckets

    def skipped(self, buckets: list[Bucket], why: str) -> list[Bucket]:
        """End the step and count it."""
        count, row = count_step(buckets, "skipped"), count_step(buckets, "consecutive")
        buckets[0].step.record[buckets[0].bound.path] = {"skipped": count}
        most: int | None = getattr(self, "max_consecutive", None)
        if most is not None and row >= most:
            raise RuntimeError(f"{type(self).__name__}: {row} steps in a row had {why}")
        return []


def anywhere(flag: Tensor) -> bool:
    """Whether a flag is set on this rank or on another."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        flag = flag.to(torch.int32)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
