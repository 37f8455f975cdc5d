"""ClipValueByEMA: every entry within a moving average of its magnitude."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    Live,
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

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        for bucket in buckets:
            self.refuse_complex(bucket)
            self._average(bucket)
        for bucket, bound in zip(buckets, self._bounds(buckets), strict=True):
            u = bucket.u.to(bucket.state_dtype)
            bucket.u = u.minimum_(bound).maximum_(bound.neg())
        return buckets

    def _bounds(self, buckets: list[Bucket]) -> list[TensorList]:
        """m, or the magnitude of what `ema_tfm` makes of it."""
        averages = [bucket.state["ema"] for bucket in buckets]
        if self.ema_tfm is None:
            return averages
        unseen = [[torch.isinf(t) for t in ema] for ema in averages]  # it gets zeros there
        inner = [
            bucket.carrying(ema.map(torch.zeros_like).where(mask, ema))
            for bucket, ema, mask in zip(buckets, averages, unseen, strict=True)
        ]
        made: dict[tuple[int, int], Tensor] = {}
        for bucket in run(inner):
            for place, t in zip(bucket.places, bucket.update, strict=True):
                made[bucket.index, place] = t
        return [
            ema.where(mask, TensorList([made[bucket.index, i] for i in bucket.places]).abs())
            for bucket, ema, mask in zip(buckets, averages, unseen, strict=True)
        ]

    def _average(self, bucket: Bucket) -> None:
        state, u = bucket.state, bucket.u.to(bucket.state_dtype)
        ema, weight = state["ema"], 1 - bucket.group["beta"]
        size = u.abs().where(u.isfinite(), ema)
        if self.ema_init == "update":
            first = ema.isinf()
            ema.copy_(size.where(first, ema.lerp(size, weight)))
        else:
            ema.lerp_(size, weight)
