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

    def check(self) -> None:
        super().check()
        self.require("steps", at_least=1, integer=True)
        if self.target != "update":
            raise ValueError(f"Accumulate: target must be 'update', got {self.target!r}")

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        return {"sum": zeros_like_state(param)}  # there between the steps that move

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        key = f"{buckets[0].bound.path}/sum"
        for bucket in buckets:
            held = [i for i, memory in enumerate(bucket.memory) if key in memory]
            if held:
                sums = TensorList([bucket.memory[i][key] for i in held], owned=True)
                sums.add_(TensorList([bucket.u.tensors[i] for i in held]))
            for i in set(range(len(bucket.params))) - set(held):
                bucket.memory[i][key] = bucket.u.tensors[i].to(bucket.state_dtype, copy=True)
        if count_step(buckets) % self.steps:
            return []
        return self._mean(buckets[0], key)

    def _mean(self, example: Bucket, key: str) -> list[Bucket]:
        """Buckets of all parameters that have had a gradient, which may be None by now."""
        store = example.store
        out = collect(
            example.groups, store, example.record, example.room, lambda p: key in store.get(p, {})
        )
        for bucket in out:
            sums = TensorList([memory.pop(key) for memory in bucket.memory], owned=True)
            bucket.grads = sums.div_(self.steps).borrow()
            bucket.update = bucket.flowing(bucket.grads.tensors)
        return out
