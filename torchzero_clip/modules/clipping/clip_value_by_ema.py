"""ClipValueByEMA: every entry within a moving average of its magnitude."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    Group,
    Live,
    State,
    TensorList,
    Transform,
    prepare,
    run,
    zeros_like_state,
)


class ClipValueByEMA(Transform):
    """m ← β m + (1 - β) |u|;   u ← min(max(u, -m), m)

    The average takes this step's entry in as well, so a sudden entry is cut to about (1 - β) of
    itself. An entry that is NaN or infinite leaves its average as it was.

    Args:
        beta: How much of the average is kept a step.
        ema_init: Start the average at "zeros" or at the first "update".
        ema_tfm: A transform or Chain of them that makes the bound from m; m itself is unharmed. The
            bound is the magnitude of what it returns.

    Example:
        >>> clip = ClipValueByEMA(0.99, ema_tfm=Scale(2.0))
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """

    beta: Live[float] = 0.99
    ema_init: Literal["zeros", "update"] = "zeros"
    ema_tfm: Transform | None = None

    complex = "refuse"
    elementwise = True

    def check(self) -> None:
        super().check()
        self.require("beta", at_least=0, below=1)
        self.require_one_of("ema_init", ("zeros", "update"))
        if self.ema_tfm is not None:
            if not isinstance(self.ema_tfm, Transform):
                raise TypeError(
                    f"ClipValueByEMA: ema_tfm must be a Transform or None, got {self.ema_tfm!r}"
                )
            if any(getattr(tfm, "target", None) == "grad" for tfm in self.ema_tfm.walk()):
                raise ValueError(
                    "ClipValueByEMA: transforms in ema_tfm work on the average and may not have "
                    f'target="grad", got {self.ema_tfm!r}'
                )

    def init(self, param: Tensor) -> dict[str, Tensor]:
        start = 0.0 if self.ema_init == "zeros" else math.inf  # inf: no average, so no bound yet
        return {"ema": torch.full_like(zeros_like_state(param), start)}

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        prepare(buckets)
        return super().prepare(buckets)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        ema = self._average(group["beta"], u, state)
        return u.minimum_(ema).maximum_(ema.neg())

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        if self.ema_tfm is None:
            return super().step(buckets)
        for bucket in buckets:
            self.refuse_complex(bucket)
            average = partial(self._average, bucket.group["beta"])
            bucket.entrywise(average, bucket.u.to(bucket.state_dtype), bucket.state)
        for bucket, made in zip(buckets, self._made(buckets), strict=True):
            held = {**bucket.state, "made": made}
            bucket.u = bucket.entrywise(_within, bucket.u.to(bucket.state_dtype), held)
        return buckets

    def _average(self, beta: Any, u: TensorList, state: State) -> TensorList:
        """Take the magnitudes of u into m."""
        ema = state["ema"]
        size = u.abs().where(u.isfinite(), ema)
        if self.ema_init == "zeros":
            return ema.lerp_(size, 1 - beta)
        return ema.copy_(size.where(ema.isinf(), ema.lerp(size, 1 - beta)))

    def _made(self, buckets: list[Bucket]) -> list[TensorList]:
        """What `ema_tfm` makes of m, or of zeros where there is none yet."""
        inner = []
        for bucket in buckets:
            copy = bucket.beside(TensorList(bucket.state["ema"].tensors)).own()
            for t in copy:
                t.nan_to_num_(torch.nan, posinf=0.0)
            inner.append(bucket.carrying(copy))
        made: dict[tuple[int, int], Tensor] = {}
        for bucket in run(inner):
            for place, t in zip(bucket.places, bucket.update, strict=True):
                made[bucket.index, place] = t
        return [TensorList([made[b.index, i] for i in b.places]) for b in buckets]


def _within(u: TensorList, held: State) -> TensorList:
    """Clamp u to the magnitudes of what was made of m, where there is one."""
    bound = held["ema"].where(held["ema"].isinf(), held["made"].abs())
    return u.minimum_(bound).maximum_(bound.neg())
