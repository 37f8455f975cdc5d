"""Reset: a rule that resets the state of another rule every `every` steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    Group,
    State,
    TensorList,
    Transform,
    count_step,
    prepare,
    run,
)
from torchzero_clip.core.bounds import Count, Whole
from torchzero_clip.core.foreach import copy_into
from torchzero_clip.core.state import statistic
from torchzero_clip.modules.flow.masked import check_inner


class Reset(Transform):
    """Momentum reset: resets the state of another rule to its initial values every `every` steps.

    Use it if a gradient spike should not stay in the averages of an optimizer such as `Adam`.

    u ← tfm(u), whose state is reset in every `every`-th step; then for k < warmup
    u ← u · (1 - 0.99 (1 + cos(π k / (warmup + 1))) / 2), k the steps since then

    Args:
        tfm: The rule or Chain whose state is reset.
        every: Reset the state in each step whose number, counted from 1, is a multiple of `every`.
        warmup: The number of steps after a reset in which updates are scaled down. Default: 0.
        keep: The names of states that are not reset. With `keep=("step",)` the count of `Adam`
            continues, so its bias correction does not restart. Default: (), reset all state.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, Chain, Modular, Reset, SpikeClip
        >>> model = torch.nn.Linear(10, 1)
        >>> spam = Reset(Chain(SpikeClip(5000.0), Adam()), every=500, warmup=150)
        >>> opt = Modular(model.parameters(), spam, LR(1e-3))

    Reference:
        Huang et al., "SPAM: spike-aware Adam with momentum reset for stable LLM training",
        arXiv 2501.06842.
    """

    tfm: Transform
    every: Count
    warmup: Whole = 0
    keep: tuple[str, ...] = ()

    inner = "chain"
    reach = "tensor"
    pure = True

    def check(self) -> None:
        super().check()
        check_inner(self)
        if not isinstance(self.keep, (tuple, list)) or not all(
            isinstance(name, str) for name in self.keep
        ):
            raise TypeError(f"Reset: keep= must be a sequence of state names, got {self.keep!r}")

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        count_step(buckets, by=0)
        return prepare(buckets)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        t = count_step(buckets, asks=True)
        step = buckets[0].step
        if step.notes.ask(self._resets, t):
            self._reset(buckets[0])
        results = run(buckets)
        if self.warmup:
            for bucket in results:
                bucket.apply(self, share=step.notes.number(bucket.device, self._share, t))
        return results

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["share"])

    def affine(self, group: Group) -> tuple[float | Tensor, float]:
        return group["share"], 0.0

    def _resets(self, t: int) -> bool:
        """Return whether the state is reset in step t."""
        return t % self.every == 0

    def _share(self, t: int) -> float:
        """Return the factor that scales the update in step t, which is 1 outside of a warm-up."""
        k = t % self.every
        if t < self.every or k >= self.warmup:
            return 1.0
        return 1 - 0.99 * (1 + math.cos(k * math.pi / (self.warmup + 1))) / 2

    def _reset(self, bucket: Bucket) -> None:
        """Reset all state of the inner rule, also for parameters without a gradient."""
        bucket.step.notes.made(f"{bucket.bound.path} resets state in this step")
        states = bucket.step.states or {}
        for link in bucket.bound.walk():
            if link is bucket.bound or not link.transforms:
                continue
            for group in bucket.step.groups:
                self._write(group["chain"], link.path, link.group_values())
                for p in group["params"]:
                    if state := states.get(p):
                        self._write(state, link.path, link.acts.per_parameter(p))

    def _write(self, state: dict[str, Any], path: str, first: Mapping[str, Any]) -> None:
        """Replace the state of a link by the initial values, and delete its step counts."""
        for key in [key for key in state if key.rpartition("/")[0] == path]:
            name = key.rpartition("/")[2]
            if name in self.keep:
                continue
            if name not in first:
                del state[key]
            elif isinstance(state[key], Tensor):
                copy_into([state[key]], [statistic(first[name], state[key])])
            else:
                state[key] = first[name]
