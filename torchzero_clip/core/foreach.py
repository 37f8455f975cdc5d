"""Operators on lists of tensors, and their operands: `_foreach_*`, and stand-ins for the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, torch_private
from torchzero_clip.core.small_tensors import (
    copies,
    in_packs,
    packs,
    shares,
    spread,
    stretched,
    unpacked,
)
from torchzero_clip.core.stacks import in_order
from torchzero_clip.core.state import HALF, statistic_dtype
from torchzero_clip.core.tensor_kinds import FEW, REAL, is_sharded

OUT = ("mul", "div", "sub", "clamp")
"""What runs from borrowed memory straight into a workspace, one call a tensor."""


def _where(x: Tensor, keep: Tensor, other: Tensor | float) -> Tensor:
    if norms.readable(keep) and keep.dim() == 0 and isinstance(other, Tensor):
        chosen = x if keep else other
        return chosen.to(x.dtype, copy=True)  # a new tensor: either list may be written later
    return torch.where(keep, x, other.to(x.dtype) if isinstance(other, Tensor) else other)


STAND_INS: dict[str, Callable[..., Tensor]] = {
    **{x: getattr(torch, x) for x in ("hypot", "atan2", "isfinite", "isinf", "isnan", "eq")},
    "where": _where,
    "positive": lambda x: x > 0,
}


def arguments(name: str, tensors: Sequence[Tensor], operands: Sequence[Any]) -> list[Any]:
    """Operands for these tensors as torch's foreach operators take them."""
    if name in ("mul", "div", "add", "sub"):
        operands = [_as_tensors(x, tensors) for x in operands]
    if name == "lerp":
        operands = _of_one_dtype(operands, tensors[0].dtype)
    return [operand(x, tensors, as_it_is=name in ("mul", "div")) for x in operands]


def operand(x: Any, tensors: Sequence[Tensor], as_it_is: bool = False) -> Any:
    """A number, or a tensor for each: operators but mul and div read a 0-dim one on the host.

    Those two take it `as_it_is`, where it is on their device.
    """
    if not isinstance(x, Tensor):
        return x
    if x.numel() == 1:
        x, first = x.reshape(()) if x.dim() else x, tensors[0]
        if not as_it_is or x.device != first.device or is_sharded(first):
            return [x] * len(tensors)
        # torch shares a call for no other dtype; in a half one the number would be rounded
        other = x.dtype != first.dtype and first.dtype not in HALF
        return x.to(first.dtype) if other and shares(tensors) else x
    if x.shape != (len(tensors),):
        raise ValueError(
            f"a vector must have one number for each of the {len(tensors)} tensors of the "
            f"list, got shape {tuple(x.shape)}: give a number, or a 0-dim tensor, for all"
        )
    return list(x.unbind())


def _of_one_dtype(operands: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Operands in the dtype of the list, since torch's lerp accepts no other."""
    end, weight = operands
    if isinstance(weight, Tensor):
        weight = weight.to(dtype)
    if isinstance(end, (list, tuple)) and end[0].dtype in HALF and dtype not in HALF:
        end = copies(end, dtype)
    return [end, weight]


def _as_tensors(x: Any, tensors: Sequence[Tensor]) -> Any:
    """Numbers for many tensors on CPU as 0-dim tensors: torch would make one for every call."""
    first = tensors[0]
    number = isinstance(x[0] if isinstance(x, (list, tuple)) and x else x, (int, float))
    few = len(tensors) < FEW or not first.dim()
    if not number or few or first.device.type != "cpu" or type(first) not in REAL:
        return x
    dtype = statistic_dtype(first)
    if isinstance(x, (int, float)):
        return torch.full((), x, dtype=dtype, device="cpu")  # a third of torch.tensor's time
    return list(torch.tensor(x, dtype=dtype, device="cpu").unbind())


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
    if not in_place and (dtype := _wider(tensors, args)) is not None:
        tensors = copies(tensors, dtype)
        foreach(name, tensors, args, in_place=True)
        return tensors
    if len(tensors) > 1 and _uneven(tensors, args):
        return _in_packs(name, tensors, args, in_place)
    options = {}
    if name == "add_scaled":
        name, args, options = "add", args[:1], {"alpha": args[1]}
    return torch_private.foreach(name + "_" * in_place, tensors, *args, **options)


def _wider(tensors: list[Tensor], args: Sequence[Any]) -> torch.dtype | None:
    """The dtype of what comes out where the tensors are in half precision and an operand is not."""
    if tensors[0].dtype not in HALF or not shares(tensors):
        return None
    firsts = [x[0] for x in args if isinstance(x, list) and isinstance(x[0], Tensor)]
    return next((x.dtype for x in firsts if x.dim() and _narrower(tensors[0], x)), None)


def _uneven(tensors: list[Tensor], args: Sequence[Any]) -> bool:
    """Whether tensors that could share a call have operands of another shape or precision.

    torch makes a call for each of them.
    """
    lists = [x for x in args if isinstance(x, list) and isinstance(x[0], Tensor)]
    if not (lists and shares(tensors)):
        return False
    if any([_narrower(some[0], tensors[0]) for some in lists]):
        return True
    return any([x.shape != t.shape for some in lists for x, t in zip(some, tensors, strict=True)])


def _narrower(x: Tensor, t: Tensor) -> bool:
    """Whether x is of a precision that t holds as well."""
    return x.dtype in HALF and t.dtype not in HALF


def _in_packs(name: str, tensors: list[Tensor], args: Sequence[Any], in_place: bool) -> Any:
    """What `foreach` does: small tensors together, their operands in the shape of the tensors."""
    rows = any([isinstance(x, list) and any(map(Tensor.dim, x)) for x in args])
    forms = [(t.dtype, t.shape) for t in tensors] if rows else None

    def made(some: list[int]) -> Any:
        mine = [tensors[i] for i in some]
        each = [[x[i] for i in some] if isinstance(x, (list, tuple)) else x for x in args]
        if len(some) > 1:
            each = [_evened(x, mine) for x in each]
        return foreach(name, mine, each, in_place) or mine

    return in_order(packs(tensors, forms), made)


def _evened(x: Any, tensors: Sequence[Tensor]) -> Any:
    """An operand in the shapes of some tensors."""
    if not isinstance(x, list) or not isinstance(x[0], Tensor):
        return x
    if all([a.shape == t.shape for a, t in zip(x, tensors, strict=True)]):
        return copies(x, tensors[0].dtype) if _narrower(x[0], tensors[0]) else x
    return stretched(x, tensors) if any(map(Tensor.dim, x)) else spread(x, tensors)


def stand_in(name: str, tensors: list[Tensor], rows: Sequence[list[Any]]) -> list[Tensor]:
    """What an operator makes that torch has no `_foreach_*` for."""
    operator, columns = STAND_INS[name], [tensors, *rows]
    if not shares(tensors):
        return [operator(*row) for row in zip(*columns, strict=True)]

    def together(some: Sequence[int]) -> list[Tensor]:
        mine = [[column[i] for i in some] for column in columns]
        return unpacked(operator(*[_packed(x, mine[0]) for x in mine]), mine[0])

    return in_packs(tensors, None, lambda i: operator(*[x[i] for x in columns]), together)


def fill_(tensors: list[Tensor], masks: Sequence[Tensor], value: Any) -> None:
    """Put a value where a mask holds; torch takes a tensor without dims alone."""
    value = value.reshape(()) if isinstance(value, Tensor) else value
    for some in packs(tensors) if shares(tensors) else [[i] for i in range(len(tensors))]:
        mine = [tensors[i] for i in some]
        if len(some) == 1:
            mine[0].masked_fill_(masks[some[0]], value)
        else:
            made = _packed(mine, mine).masked_fill_(_packed([masks[i] for i in some], mine), value)
            torch_private.foreach("copy_", mine, unpacked(made, mine))


def _packed(column: list[Any], tensors: list[Tensor]) -> Any:
    """An operand of each of some tensors as one for their pack."""
    first = column[0]
    if all([x is first for x in column]) and not (isinstance(first, Tensor) and first.dim()):
        return first
    return torch.cat([x.expand(t.shape).reshape(-1) for x, t in zip(column, tensors, strict=True)])


def copy_into(target: list[Tensor], source: Sequence[Tensor]) -> None:
    """Put values into tensors."""
    if target and is_sharded(target[0]):  # torch has no _foreach_copy_ for DTensor
        for t, s in zip(target, source, strict=True):
            t.copy_(s)
    else:
        torch_private.foreach("copy_", target, list(source))
