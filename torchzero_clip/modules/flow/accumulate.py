"""Accumulate: several small batches as one large."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    TensorList,
    Transform,
    collect,
    count_step,
    zeros_like_state,
)
from torchzero_clip.core.norms.shards import local


class Accumulate(Transform):
    """s ← s + u;   every `steps`-th step u ← s / steps, s ← 0; in between nothing after it runs

    Links after it see the mean in `group["grads"]` too. A gradient that is missing in one of the
    steps counts as zero.

    Args:
        steps: How many steps make one.

    Example:
        >>> opt = Modular(model.parameters(), Accumulate(4), ClipNorm(1.0), Adam(), LR(1e-3))
    """

    steps: int

    produces = False  # what leaves is the gradient of the large batch
    numbers = ("begun",)

    def check(self) -> None:
        super().check()
        self.require("steps", at_least=1, integer=True)
        if self.target != "update":
            raise ValueError(f"Accumulate: target must be 'update', got {self.target!r}")

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        return {"sum": zeros_like_state(param), "begun": 0}  # 1 with gradients in the sum

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        count_step(buckets, by=0)
        for bucket in buckets:
            self._sums(bucket)
        return buckets

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        path = buckets[0].bound.path
        for bucket in buckets:
            sums, begun = self._sums(bucket), [int(m[f"{path}/begun"]) for m in bucket.memory]
            for value, write in ((0, TensorList.copy_), (1, TensorList.add_)):
                here = [i for i, old in enumerate(begun) if old == value]
                if here:
                    some = TensorList([sums[i] for i in here], owned=True)
                    write(some, TensorList([bucket.u.tensors[i] for i in here]))
            for memory in bucket.memory:
                memory[f"{path}/begun"] = 1
        if count_step(buckets) % self.steps:
            return []
        return self._mean(buckets[0], path)

    def _sums(self, bucket: Bucket) -> list[Tensor]:
        """What is here of the sums, made where they are missing."""
        path = bucket.bound.path
        for p, memory in zip(bucket.given, bucket.memory, strict=True):
            if f"{path}/sum" not in memory:
                memory[f"{path}/sum"], memory[f"{path}/begun"] = zeros_like_state(p), 0
        return [local(memory[f"{path}/sum"]) for memory in bucket.memory]

    def _mean(self, example: Bucket, path: str) -> list[Bucket]:
        """Buckets of all parameters that have had a gradient, which may be None by now."""
        store = example.store
        out = collect(
            example.groups,
            store,
            example.record,
            example.room,
            lambda p: bool(store.get(p, {}).get(f"{path}/begun")),
            example.process_group,
        )
        for bucket in out:
            sums = TensorList(
                [local(memory[f"{path}/sum"]) for memory in bucket.memory], owned=True
            )
            bucket.grads = sums.div_(self.steps).borrow()
            for memory in bucket.memory:
                memory[f"{path}/begun"] = 0
            bucket.update = bucket.flowing(bucket.grads.tensors)
            bucket.wait_like(example)
        return out
