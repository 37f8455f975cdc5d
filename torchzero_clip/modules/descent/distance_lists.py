"""What rules share that estimate how far away the solution is: passes over lists.

An accelerator takes them part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from torchzero_clip.core import Bucket, TensorList, Units, zeros_like_state
from torchzero_clip.core.norms import NAMED

Weights: TypeAlias = "Tensor | Sequence[Any]"
"""A number for each group, as a vector or as they are."""
AVERAGES = ("exp_avg", "exp_avg_sq", "s")


def averages(param: Tensor) -> dict[str, Tensor]:
    """The averages m and v of a parameter, and the sum s."""
    return {name: zeros_like_state(param) for name in AVERAGES}


def flowing(units: Units, decouple: bool) -> list[TensorList]:
    """What flows, in the precision of state, with the decay where it is not decoupled."""
    us = [bucket.u.to(bucket.state_dtype) for bucket in units.buckets]
    return us if decouple else decayed(units, us, units.each("weight_decay"))


def times(units: Units, us: Sequence[TensorList], weights: Weights) -> list[TensorList]:
    """weight · u"""
    rows = zip(units.buckets, us, strict=True)
    return [b.entrywise(TensorList.mul_, u, x=_at(units, b, weights)) for b, u in rows]


def decayed(units: Units, us: Sequence[TensorList], weights: Weights) -> list[TensorList]:
    """u + weight · w"""
    rows = [(b, u, _at(units, b, weights)) for b, u in zip(units.buckets, us, strict=True)]
    return [b.entrywise(TensorList.add_, u, x=b.params, alpha=x) for b, u, x in rows]


def remember(
    units: Units, us: Sequence[TensorList], m: Sequence[Tensor], v: Tensor, s: Sequence[Tensor]
) -> None:
    """m ← m₀ m + m₁ u;   v ← v + v₀ (u² - v);   s ← s₀ s + s₁ u"""
    vectors = {"keep": m[0], "take": m[1], "share": v, "keep_s": s[0], "take_s": s[1]}
    for bucket, u in zip(units.buckets, us, strict=True):
        weights = {name: _at(units, bucket, x) for name, x in vectors.items()}
        bucket.write(_remember, u, {name: bucket.state[name] for name in AVERAGES}, **weights)
        bucket.settle()


def _remember(
    u: TensorList, exp_avg: TensorList, exp_avg_sq: TensorList, s: TensorList, **weights: Any
) -> None:
    exp_avg.mul_(weights["keep"]).add_(u, alpha=weights["take"])
    exp_avg_sq.lerp_(u.square(), weights["share"])
    s.mul_(weights["keep_s"]).add_(u, alpha=weights["take_s"])


def over_root(units: Units, us: Sequence[TensorList], name: str, eps: Weights) -> list[TensorList]:
    """The state with a name over √v + eps, in the memory of u."""
    rows = [(b, u, _at(units, b, eps)) for b, u in zip(units.buckets, us, strict=True)]
    return [
        b.entrywise(_over_root, u, m=b.state[name], v=b.state["exp_avg_sq"], eps=x)
        for b, u, x in rows
    ]


def _over_root(u: TensorList, m: TensorList, v: TensorList, eps: Any) -> TensorList:
    return u.copy_(v).sqrt_().add_(eps).div_(m).reciprocal_()


def dot(
    units: Units, some: Sequence[TensorList], others: Sequence[TensorList], weights: Tensor
) -> Tensor:
    """The inner product of the whole model, the others with these weights."""
    rows = zip(units.buckets, times(units, others, weights), some, strict=True)
    products = [bucket.entrywise(TensorList.mul_, x, x=u) for bucket, x, u in rows]
    return _as_one(units).sums_of(products)[0]


def size(units: Units, weights: Tensor) -> Tensor:
    """‖s‖₁ of the whole model, s with these weights."""
    held = [bucket.state["s"].borrow() for bucket in units.buckets]
    return _as_one(units).norms_of(times(units, held, weights))[0]


def _at(units: Units, bucket: Bucket, weights: Weights) -> Any:
    """The weight of the bucket's group, for its lists."""
    if isinstance(weights, Tensor):
        return units.operand(bucket, weights)
    return weights[units.division.indexes.index(bucket.part.index)]


def _as_one(units: Units) -> Units:
    """All as one unit, and so the stages of a pipeline too, whichever groups they have."""
    return Units(units.buckets, "global", NAMED["l1"])
