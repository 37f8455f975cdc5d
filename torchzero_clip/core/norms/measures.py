"""Measures: the orders of norms, and how statistics of tensors are combined into norms of units.

A statistic describes a tensor by a column with a few numbers, such as a norm, a maximum, a count or
a sum. For std and var, the column contains the mean and √M2, where M2 is the sum of squared
distances from the mean. The statistics of several tensors can be combined. Sums are computed in
float64.
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
    """The order of a norm.

    Attributes:
        kind: The kind of statistic.
        p: The order of a p-norm, if `kind` is "power".
        degree: If all tensors are multiplied by c, the norm is multiplied by |c| to this power.
        mean: Whether the norm is a power mean. Otherwise it is a power sum.
        root: Whether the norm is the standard deviation. Otherwise it is the variance.
    """

    kind: Literal["power", "max", "count", "spread", "sum"]
    p: float = 2.0
    degree: int = 1
    mean: bool = False
    root: bool = False

    @property
    def rows(self) -> int:
        """The number of rows in the statistic of a tensor."""
        if self.kind == "spread":
            return 3
        return 2 if self.kind == "sum" else 1

    @property
    def counts(self) -> bool:
        """Whether norms depend on the number of elements, in addition to the statistics."""
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
    """Return the measure for an argument `ord`, or raise ValueError with the choices."""
    if isinstance(order, str) and order in {"inf", *NAMED}:  # "inf" as torch takes it
        return NAMED["linf" if order == "inf" else order]
    finite = not isinstance(order, int) or order.bit_length() < 1024  # so that a float can hold it
    if isinstance(order, (int, float)) and not isinstance(order, bool) and order >= 0 and finite:
        ends = {0: NAMED["l0"], math.inf: NAMED["linf"]}
        return ends.get(order) or Measure("power", float(order))
    raise ValueError(
        f"must be a number of at least 0, inf, or one of {list(NAMED)}, got {got(order)}"
    )


def merge(stats: Tensor, counts: Tensor | None, m: Measure) -> Tensor:
    """Combine the statistics of parts into the statistics of units.

    Args:
        stats: The statistics of the parts, of shape (rows, units, parts).
        counts: The number of elements of each part, of shape (units, parts). It is only used if the
            measure depends on it.
        m: The measure.

    Returns:
        The statistics of the units, of shape (rows, units).
    """
    if m.kind == "power":
        return stats.squeeze(2) if stats.shape[2] == 1 else vector_norm(stats, m.p)
    if m.kind == "max":
        return stats.amax(dim=2)
    if m.kind != "spread":
        return stats.sum(dim=2)
    assert counts is not None
    scale = safe_scale(stats.abs().amax(dim=(0, 2)))  # keeps the squares below in range
    rows = stats / scale.unsqueeze(1)
    mean = (rows[:2] * counts).sum(dim=2) / counts.sum(dim=1).clamp(min=1)
    away = (rows[:2] - mean.unsqueeze(2)).square().sum(dim=0)
    m2 = (rows[2].square() + counts * away).sum(dim=1)
    return torch.cat([mean, m2.sqrt().unsqueeze(0)]) * scale


def finish(stats: Tensor, count: Tensor | None, m: Measure) -> Tensor:
    """Compute the norms of units from their statistics.

    Args:
        stats: The statistics, of shape (rows, units).
        count: The number of elements of each unit. It is only used if the measure depends on it.
        m: The measure.
    """
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
    """Return the divisor that brings the norm of a single unit on CPU to a limit.

    This is faster than a computation with vectors. Return None if there are several units, or if
    the host cannot read the norm without synchronization.

    Args:
        norm: The norm.
        limit: The norm that the unit may have.
        sets: Whether a smaller norm is scaled up to the limit.
        degree: If the unit is multiplied by c, its norm is multiplied by |c| to this power.
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
"""Operations that are applied to tensors in order: pairs of "mul" or "div" and an operand."""


def divisions(ratio: Tensor, dtype: torch.dtype, number: bool = False) -> Divisions:
    """Return the operations that divide tensors of a dtype by a ratio.

    If the ratio cannot be read on the host, the only operation is a division. If all ratios are 1,
    there is no operation. Otherwise the tensors are multiplied by the inverse of the ratio. If the
    dtype cannot represent a ratio or its inverse well, the tensors are also divided by a power of
    two. Division by a power of two is exact. So the result for a unit does not depend on the ratios
    of other units.

    Args:
        ratio: The ratio of each unit.
        dtype: The dtype of the tensors.
        number: Whether the factor of a single unit may be a float, of any size.
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
    """Return a factor and a divisor that together divide by a ratio of any size.

    The divisor is 1, unless the ratio is very large or very small.
    """
    safe = safe_scale(ratio)
    most = 1e290 if dtype in DOUBLE else 1e30
    far = (safe < 1 / most) | (safe > most)
    power = torch.exp2((torch.log2(safe) / 2).floor())  # a power of two divides exactly
    divisor = torch.where(far, power, torch.ones_like(ratio))
    return divisor / ratio, divisor


def factor_of(ratio: Tensor, dtype: torch.dtype) -> float:
    """Return 1 / ratio for a single ratio.

    For tensors in float32, the result is rounded to float32 if float32 can represent it well. With
    several units, each factor is an element of a float32 tensor. So the factor of a unit is bitwise
    identical in both cases.
    """
    x = ratio.item()
    factor = 1 / x if x else math.copysign(math.inf, x)
    single = dtype in (torch.float32, torch.complex64) and 1e-30 < abs(factor) < 1e30
    return ctypes.c_float(factor).value if single else factor


def halves(factor: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return a factor that the dtype can represent well, and a power of two to divide by.

    The power of two is 1, unless the factor is very large or very small.
    """
    if in_range(factor, dtype) or not factor or not math.isfinite(factor):
        return factor, 1.0
    divisor = 2.0 ** -math.floor(math.log2(abs(factor)) / 2)
    return factor * divisor, divisor


def in_range(x: float, dtype: torch.dtype) -> bool:
    """Return whether a dtype can represent a number and its inverse well."""
    most = 1e290 if dtype in DOUBLE else 1e30
    return 1 / most < abs(x) < most


def _ends(ratio: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest element of a vector as numbers on the host.

    Both are NaN if an element is NaN, and 1 if the vector is empty.
    """
    if not ratio.numel():
        return 1.0, 1.0
    if ratio.numel() == 1:
        x = ratio.item()
        return x, x
    low, high = torch.aminmax(ratio)
    return low.item(), high.item()
