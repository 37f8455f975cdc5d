"""Counts: numbers that a link keeps once for all parameters, in every group."""

from __future__ import annotations

from collections.abc import Sequence

from torchzero_clip.core.bucket import Bucket


def count_step(buckets: Sequence[Bucket], name: str = "step", by: int = 1) -> int:
    """The count of steps of this link, this one included: a number kept in every group."""
    path, groups = f"{buckets[0].bound.path}/{name}", buckets[0].step.groups
    buckets[0].step.skip.read(f"{buckets[0].bound.path} counts the steps that happen")
    count = int(groups[0]["chain"].get(path, 0)) + by
    keep_number(buckets, name, count)
    return count


def keep_number(buckets: Sequence[Bucket], name: str, value: int) -> None:
    """Keep a number of this link in every group."""
    for group in buckets[0].step.groups:
        group["chain"][f"{buckets[0].bound.path}/{name}"] = value
