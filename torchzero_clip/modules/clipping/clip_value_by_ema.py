"""ClipValueByEMA: a rule that limits every element to a moving average of its magnitude."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from torchzero_clip.core import Bucket, Group, Live, State, TensorList, Transform, zeros_like_state
from torchzero_clip.core.bounds import Share
from torchzero_clip.core.chain import prepare, transformed
from torchzero_clip.core.transform import dropping


class ClipValueByEMA(Transform):
    """Value clipping without a threshold: the limit of an element is its average magnitude.

    Use it if single elements spike and you don't know a good threshold.

    m ← β m + (1 - β) |u|;   u ← min(max(u, -m), m)

    The average m includes the current update, so a sudden spike is reduced to about 1 - β times its
    size. If an element is NaN or infinite, the m of this element does not change.

    Args:
        beta: The decay rate of the average m. Default: 0.99.
        ema_init: The first value of the average: "zeros", or "update" for the first update that the
            rule receives. Default: "zeros".
        ema_tfm: A rule or Chain that computes the limit from m, such as `Scale(2.0)`. The limit is
            the magnitude of the result. The average m does not change. The rules inside must return
            a result for every parameter in every step, so guards, `Freeze`, `Accumulate` and
            classes with `drops = True` raise an error. Default: None, the limit is m.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipValueByEMA, Modular, Scale
        >>> model = torch.nn.Linear(10, 1)
        >>> clip = ClipValueByEMA(0.99, ema_tfm=Scale(2.0))
        >>> opt = Modular(model.parameters(), clip, Adam(), LR(1e-3))
    """

    beta: Live[Share] = 0.99
    ema_init: Literal["zeros", "update"] = "zeros"
    ema_tfm: Transform | None = None

    complex = "refuse"
    reach = "tensor"
    per_entry = True
    pure = True

    def check(self) -> None:
        super().check()
        if (tfm := self.ema_tfm) is None:
            return
        if not isinstance(tfm, Transform):
            raise TypeError(f"ClipValueByEMA: ema_tfm must be a Transform or None, got {tfm!r}")
        if dropping(tfm):
            raise ValueError(
                "ClipValueByEMA: ema_tfm must return a value for every parameter in every "
                f"step, got {tfm!r}: put guards, Freeze, Accumulate, and all transforms "
                'with target="grad", before ClipValueByEMA'
            )

    def init(self, param: Tensor) -> dict[str, Tensor]:
        # infinity says that there is no average yet, and so no limit
        start = 0.0 if self.ema_init == "zeros" else torch.inf
        return {"ema": torch.full_like(zeros_like_state(param), start)}

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        prepare(buckets)
        return buckets

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        ema = self._average(group["beta"], u, state)
        return u.minimum_(ema).maximum_(ema.neg())

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        if self.ema_tfm is None:
            return super().step(buckets)
        for bucket in buckets:
            self._average(bucket.group["beta"], bucket.u, bucket.state)
        averages = [bucket.state["ema"].clone() for bucket in buckets]
        for t in [t for average in averages for t in average]:
            t.nan_to_num_(torch.nan, posinf=0.0)  # infinity marks elements without an average yet
        transformed_averages = transformed(buckets, averages)
        for bucket, transformed_average in zip(buckets, transformed_averages, strict=True):
            ema = bucket.state["ema"]
            bound = ema.where(ema.isinf(), transformed_average.abs())
            bucket.u = bucket.u.minimum_(bound).maximum_(bound.neg())
        return buckets

    def _average(self, beta: Any, u: TensorList, state: State) -> TensorList:
        """Add the magnitudes of u to the average m, and return m."""
        ema = state["ema"]
        size = u.abs().where(u.isfinite(), ema)
        if self.ema_init == "zeros":
            return ema.lerp_(size, 1 - beta)
        return ema.copy_(size.where(ema.isinf(), ema.lerp(size, 1 - beta)))
