"""Operators on lists of tensors: torch's `_foreach_*`, and stand-ins where torch has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, private
from torchzero_clip.core.tensors import is_sharded

OUT = ("mul", "div", "sub", "clamp")
"""What runs from borrowed memory straight into a workspace, one call a tensor."""


def _where(x: Tensor, keep: Tensor, other: Tensor | float) -> Tensor:
    if norms.readable(keep) and keep.dim() == 0 and isinstance(other, Tensor):
        return x if keep else other.to(x.dtype)
    return torch.where(keep, x, other.to(x.dtype) if isinstance(other, Tensor) else other)


def _positive(x: Tensor) -> Tensor:
    return x > 0


STAND_INS: dict[str, Callable[..., Tensor]] = {
    "where": _where,
    "hypot": torch.hypot,
    "isfinite": torch.isfinite,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "positive": _positive,
}


def vector_operand(x: Any, vector: Tensor) -> Any:
    """An operand for the vector that 0-dim tensors share, as foreach takes it; None for others."""
    if isinstance(x, Tensor) and x.dim() < 2:
        return [x.to(vector.dtype)]
    return x if isinstance(x, (int, float)) else None


def foreach(name: str, tensors: list[Tensor], args: Sequence[Any], in_place: bool = False) -> Any:
    """The tensors that torch's foreach operator of this name makes, or nothing where it writes."""
    if name == "clamp":
        made = foreach("clamp_min", tensors, args[:1], in_place)
        foreach("clamp_max", tensors if in_place else made, args[1:], in_place=True)
        return made
    options = {}
    if name == "add_scaled":
        name, args, options = "add", args[:1], {"alpha": args[1]}
    return private.foreach(name + "_" * in_place, tensors, *args, **options)


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors with these values, in a dtype."""
    if tensors[0].dtype != dtype or not private.has_foreach("clone"):
        return [t.to(dtype, copy=True) for t in tensors]
    return list(private.foreach("clone", list(tensors)))


def copy_into(target: list[Tensor], source: Sequence[Tensor]) -> None:
    """Put values into tensors."""
    if target and is_sharded(target[0]):  # torch has no _foreach_copy_ for DTensor
        for t, s in zip(target, source, strict=True):
            t.copy_(s)
    else:
        private.foreach("copy_", target, list(source))
