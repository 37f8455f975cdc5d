"""Reset: what is inside forgets, now and then."""

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
    """u ← tfm(u), whose state begins anew in every `every`-th step; then for k < warmup
    u ← u · (1 - 0.99 (1 + cos(π k / (warmup + 1))) / 2), k the steps since then

    Args:
        tfm: A transform or a Chain.
        every: The state begins anew in the steps whose number this divides; the first is 1.
        warmup: The steps that begin small after that.
        keep: The names of state that goes on, as in `keep=("step",)` for the count of `Adam`,
            which then debiases as if its averages had not begun anew.

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
            raise TypeError(f"Reset: keep must be names of state, got {self.keep!r}")

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        count_step(buckets, by=0)
        return prepare(buckets)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        t, step = count_step(buckets, asks=True), buckets[0].step
        if step.notes.ask(self._begins, t):
            self._begin_anew(buckets[0])
        out = run(buckets)
        for bucket in out if self.warmup else ():
            bucket.apply(self, share=step.notes.number(bucket.device, self._share, t))
        return out

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["share"])

    def affine(self, group: Group) -> tuple[float | Tensor, float]:
        return group["share"], 0.0

    def _begins(self, t: int) -> bool:
        return t % self.every == 0

    def _share(self, t: int) -> float:
        """The part that is left of an update: 1 where none are small any more."""
        k = t % self.every
        if t < self.every or k >= self.warmup:
            return 1.0
        return 1 - 0.99 * (1 + math.cos(k * math.pi / (self.warmup + 1))) / 2

    def _begin_anew(self, bucket: Bucket) -> None:
        """Put all state inside back to its first values, that of idle parameters too."""
        bucket.step.notes.made(f"{bucket.bound.path} begins anew, in this step alone")
        states = bucket.step.states or {}
        for link in bucket.bound.walk():
            if link is bucket.bound or not link.transforms:
                continue
            for group in bucket.step.groups:
                self._put(group["chain"], link.path, link.group_values())
                for p in group["params"]:
                    if held := states.get(p):
                        self._put(held, link.path, link.acts.per_parameter(p))

    def _put(self, held: dict[str, Any], path: str, first: Mapping[str, Any]) -> None:
        """Write first values where some are held; counts of steps, which have none, go."""
        for key in [key for key in held if key.rpartition("/")[0] == path]:
            name = key.rpartition("/")[2]
            if name in self.keep:
                continue
            if name not in first:
                del held[key]
            elif isinstance(held[key], Tensor):
                copy_into([held[key]], [statistic(first[name], held[key])])
            else:
                held[key] = first[name]
