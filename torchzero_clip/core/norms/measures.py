"""Measures: the orders of a norm, and how the statistics of parts become the norm of a whole.

A statistic of one tensor is a column of a few numbers that combine over tensors: a norm for the
p-norms, a maximum, a count, a sum, or mean and √M2 for std and var. Sums are taken in float64.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.argument_values import got
from torchzero_clip.core.norms.numeric import readable, safe_scale, vector_norm
from torchzero_clip.core.state import DOUBLE

Ord: TypeAlias = "float | str"


@dataclass(frozen=True)
class Measure:
    """A norm order: the kind of sum, and the power of a factor with which the norm grows."""

    kind: Literal["power", "max", "count", "spread", "sum"]
    p: float = 2.0
    degree: int = 1
    mean: bool = False  # a power mean rather than a power sum
    root: bool = False  # std rather than var

    @property
    def rows(self) -> int:
        """The count of numbers in the statistic of a tensor."""
        return {"spread": 3, "sum": 2}.get(self.kind, 1)

    @property
    def counts(self) -> bool:
        """Whether norms need the number of entries beside the statistics."""
        return self.mean or self.kind == "spread"


NAMED = {
    "l0": Measure("count", degree=0),
    **{f"l{p}": Measure("power", float(p)) for p in (1, 2, 3, 4)},
    "linf": Measure("max"),
    "mad": Measure("power", 1.0, mean=True),
    "rms": Measure("power", 2.0, mean=True),
    "std": Measure("spread", root=True),
    "var": Measure("spread", degree=2),
    "sum": Measure("sum"),
}


def measure(order: Ord) -> Measure:
    """The measure behind `ord`; raises ValueError with the choices."""
    if isinstance(order, str) and order in {"inf", *NAMED}:  # "inf" as torch takes it
        return NAMED["linf" if order == "inf" else order]
    finite = not isinstance(order, int) or order.bit_length() < 1024  # so that a float can hold it
    if isinstance(order, (int, float)) and not isinstance(order, bool) and order >= 0 and finite:
        ends = {0: NAMED["l0"], math.inf: NAMED["linf"]}
        return ends.get(order) or Measure("power", float(order))
    raise ValueError(f"must be a number > 0, inf, 0, or one of {list(NAMED)}, got {got(order)}")


def merge(stats: Tensor, counts: Tensor | None, m: Measure) -> Tensor:
    """Statistics of shape (rows, units, parts) as those of the units, (rows, units).

    `counts` says of how many entries each part is, where the measure needs it: (units, parts).
    """
    if m.kind == "power":
        return stats.squeeze(2) if stats.shape[2] == 1 else vector_norm(stats, m.p)
    if m.kind == "max":
        return stats.amax(dim=2)
    if m.kind != "spread":
        return stats.sum(dim=2)
    assert counts is not None
    scale = safe_scale(stats.abs().amax(dim=(0, 2)))  # squares must stay in range
    rows = stats / scale.unsqueeze(1)
    mean = (rows[:2] * counts).sum(dim=2) / counts.sum(dim=1).clamp(min=1)
    away = (rows[:2] - mean.unsqueeze(2)).square().sum(dim=0)
    m2 = (rows[2].square() + counts * away).sum(dim=1)
    return torch.cat([mean, m2.sqrt().unsqueeze(0)]) * scale


def finish(stats: Tensor, count: Tensor | None, m: Measure) -> Tensor:
    """The norms of units from their statistics, (rows, units); `count` is their size."""
    if m.kind == "sum":
        return torch.hypot(stats[0], stats[1])
    if not m.counts:
        return stats[0]
    assert count is not None
    if m.mean:
        return stats[0] / count.clamp(min=1) ** (1 / m.p)
    root = stats[2] / (count - 1).clamp(min=1).sqrt()
    root = torch.where(count < 2, torch.zeros_like(root), root)  # one, even infinite, has none
    return root if m.root else root.square()


def known_divisor(norm: Tensor, limit: float, sets: bool, degree: int) -> Tensor | None:
    """Return what a single unit on CPU is divided by for its norm to meet a limit.

    This is faster than the same with vectors. None if there are several units, or if the norm
    cannot be read.

    Args:
        norm: The norm.
        limit: The norm that the unit may have.
        sets: Whether a smaller norm is scaled up to the limit.
        degree: The power of a factor of the unit with which its norm grows.
    """
    if not readable(norm) or norm.numel() != 1:
        return None
    limit = float(limit)
    size = norm.item()
    ratio = 1.0
    stays = limit == math.inf or (size == 0 if sets else size <= limit)
    if not stays:
        if limit:
            ratio = size / limit
        else:
            ratio = math.inf if size > 0 else math.nan
        if degree == 2:
            ratio = math.sqrt(ratio)
    return torch.full((1,), ratio, dtype=norm.dtype, device=norm.device)


Divisions: TypeAlias = "Iterable[tuple[str, Any]]"
"""Factors and divisors of tensors, one after another: pairs of "mul" or "div" and the operand."""


def divisions(ratio: Tensor, dtype: torch.dtype, number: bool = False) -> Divisions:
    """The factors and divisors that divide tensors of a dtype by `ratio`; none where all are 1.

    A product, and an exact quotient where the dtype holds the ratio or its inverse badly or not at
    all, so that no unit's bits depend on another's ratio. Where the ratio cannot be read it is one
    quotient. The factor of a single unit may be a `number` of any size.
    """
    if not readable(ratio):
        return [("div", ratio)]
    low, high = _ends(ratio)
    if low == high == 1:
        return []
    if number and ratio.numel() == 1:
        return [("mul", factor_of(ratio, dtype))]
    if in_range(low, dtype) and in_range(high, dtype):
        return [("mul", ratio.reciprocal())]
    rest, divisor = in_two(ratio, dtype)
    return [("mul", rest)] if _ends(divisor) == (1, 1) else [("mul", rest), ("div", divisor)]


def in_two(ratio: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A factor and a divisor that divide by a ratio of any size; the divisor mostly is 1."""
    safe = safe_scale(ratio)
    most = 1e290 if dtype in DOUBLE else 1e30
    far = (safe < 1 / most) | (safe > most)
    power = torch.exp2((torch.log2(safe) / 2).floor())  # a power of two divides exactly
    divisor = torch.where(far, power, torch.ones_like(ratio))
    return divisor / ratio, divisor


def factor_of(ratio: Tensor, dtype: torch.dtype) -> float:
    """1 / ratio of a single ratio, rounded as an entry of a tensor would be where that holds it."""
    x = ratio.item()
    factor = 1 / x if x else math.copysign(math.inf, x)
    single = dtype in (torch.float32, torch.complex64) and 1e-30 < abs(factor) < 1e30
    return ctypes.c_float(factor).value if single else factor


def halves(factor: float, dtype: torch.dtype) -> tuple[float, float]:
    """A factor as one that the dtype holds well, and a power of two to divide by: mostly 1."""
    if in_range(factor, dtype) or not factor or not math.isfinite(factor):
        return factor, 1.0
    divisor = 2.0 ** -math.floor(math.log2(abs(factor)) / 2)
    return factor * divisor, divisor


def in_range(x: float, dtype: torch.dtype) -> bool:
    """Whether a dtype holds a number and its inverse."""
    most = 1e290 if dtype in DOUBLE else 1e30
    return 1 / most < abs(x) < most


def _ends(ratio: Tensor) -> tuple[float, float]:
    """The smallest and the largest entry of a vector that can be read; NaN where one is."""
    if ratio.numel() < 2:
        return (ratio.item(),) * 2 if ratio.numel() else (1.0, 1.0)
    low, high = torch.aminmax(ratio)
    return low.item(), high.item()
