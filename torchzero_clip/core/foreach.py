"""Operators on lists of tensors: torch's `_foreach_*`, and stand-ins where torch has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.tensors import is_sharded

OUT = ("mul", "div", "sub", "clamp")
"""What runs from borrowed memory straight into a workspace, one call a tensor."""


def _where(x: Tensor, keep: Tensor, other: Tensor | float) -> Tensor:
    if keep.dim() == 0 and norms.readable(keep) and isinstance(other, Tensor):
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


def one_number(x: Tensor) -> Tensor:
    """A tensor of one number, which is one for all, as torch takes it."""
    return x.reshape(()) if x.dim() else x


def fits_vector(x: Any) -> bool:
    """Whether an operand of 0-dim tensors does for the vector that they share."""
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.dim() < 2)


def write_vector(name: str, vector: Tensor, operands: Sequence[Any]) -> None:
    """Run an operator on numbers that share their memory, as one."""
    args: list[Any] = [x.to(vector.dtype) if isinstance(x, Tensor) else x for x in operands]
    if name == "add_scaled":
        vector.add_(args[0], alpha=args[1])
    elif name == "addcmul":
        vector.addcmul_(*args[:2], value=args[2] if args[2:] else 1)
    else:
        getattr(vector, name + "_")(*args)


def foreach(name: str, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """What torch's foreach operator of this name makes."""
    return getattr(torch, "_foreach_" + name)(tensors, *args, **kwargs)


def copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """New tensors with these values, in a dtype."""
    if tensors[0].dtype != dtype or not hasattr(torch, "_foreach_clone"):
        return [t.to(dtype, copy=True) for t in tensors]
    return list(torch._foreach_clone(list(tensors)))


def copy_into(target: list[Tensor], source: Sequence[Tensor]) -> None:
    """Put values into tensors."""
    if target and is_sharded(target[0]):  # torch has no _foreach_copy_ for DTensor
        for t, s in zip(target, source, strict=True):
            t.copy_(s)
    else:
        torch._foreach_copy_(target, list(source))
