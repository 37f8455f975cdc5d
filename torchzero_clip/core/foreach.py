"""Operators on lists of tensors: torch's `_foreach_*` operators, and functions for all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, torch_private
from torchzero_clip.core.small_tensors import copies, expanded, in_packs, packs, shares, unpacked
from torchzero_clip.core.stacks import in_order
from torchzero_clip.core.state import HALF, statistic_dtype
from torchzero_clip.core.tensor_kinds import FEW, REAL, is_sharded

OUT = ("mul", "div", "sub", "clamp")
"""Operators that read borrowed memory and write a workspace directly, with a call per tensor."""


def _where(x: Tensor, keep: Tensor, other: Tensor | float) -> Tensor:
    """Return torch.where(keep, x, other) in the dtype of x. A flag on CPU is read on the host."""
    if norms.readable(keep) and keep.dim() == 0 and isinstance(other, Tensor):
        chosen = x if keep else other
        return chosen.to(x.dtype, copy=True)  # a new tensor: either list may be written later
    return torch.where(keep, x, other.to(x.dtype) if isinstance(other, Tensor) else other)


STAND_INS: dict[str, Callable[..., Tensor]] = {
    **{x: getattr(torch, x) for x in ("hypot", "atan2", "isfinite", "isinf", "isnan", "eq")},
    "where": _where,
    "positive": lambda x: x > 0,
}
"""Functions of single tensors, for operators that torch has no `_foreach_*` for."""


def arguments(name: str, tensors: Sequence[Tensor], operands: Sequence[Any]) -> list[Any]:
    """Convert operands for a foreach operator of torch.

    Args:
        name: The name of the operator.
        tensors: The tensors of the list.
        operands: Numbers, tensors, or lists with a tensor for each tensor of the list.
    """
    if name in ("mul", "div", "add", "sub"):
        operands = [_as_tensors(x, tensors) for x in operands]
    if name == "lerp":
        operands = _of_one_dtype(operands, tensors[0].dtype)
    return [operand(x, tensors, as_it_is=name in ("mul", "div")) for x in operands]


def operand(x: Any, tensors: Sequence[Tensor], as_it_is: bool = False) -> Any:
    """Convert a tensor operand to a list with a 0-dim tensor for each tensor of the list.

    Most foreach operators would read a single 0-dim tensor on the host. Only mul and div accept
    such a tensor `as_it_is`, if it is on the device of the list. All other operands are returned
    unchanged.
    """
    if not isinstance(x, Tensor):
        return x
    if x.numel() == 1:
        if x.dim():
            x = x.reshape(())
        first = tensors[0]
        if not as_it_is or x.device != first.device or is_sharded(first):
            return [x] * len(tensors)
        # torch shares a call only if dtypes are equal, but half precision would round the scalar
        other = x.dtype != first.dtype and first.dtype not in HALF
        return x.to(first.dtype) if other and shares(tensors) else x
    if x.shape != (len(tensors),):
        raise ValueError(
            "a vector operand must have one element per tensor of the TensorList, here "
            f"{len(tensors)}, got shape {tuple(x.shape)}. To use one value for all tensors, pass "
            "a number or a 0-dim tensor"
        )
    return list(x.unbind())


def _of_one_dtype(operands: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Convert the operands of lerp to the dtype of the list, because torch requires this dtype."""
    end, weight = operands
    if isinstance(weight, Tensor):
        weight = weight.to(dtype)
    if isinstance(end, Tensor):
        end = end.to(dtype)
    if isinstance(end, (list, tuple)) and end[0].dtype in HALF and dtype not in HALF:
        end = copies(end, dtype)
    return [end, weight]


def _as_tensors(x: Any, tensors: Sequence[Tensor]) -> Any:
    """Convert numbers to 0-dim tensors if there are many tensors on CPU.

    torch would convert a number again for each tensor.
    """
    first = tensors[0]
    if len(tensors) < FEW or not first.dim():
        return x
    number = isinstance(x[0] if isinstance(x, (list, tuple)) and x else x, (int, float))
    if not number or first.device.type != "cpu" or type(first) not in REAL:
        return x
    dtype = statistic_dtype(first)
    if isinstance(x, (int, float)):
        return torch.full((), x, dtype=dtype, device="cpu")  # three times as fast as torch.tensor
    return list(torch.tensor(x, dtype=dtype, device="cpu").unbind())


def vector_operand(x: Any, vector: Tensor) -> Any:
    """Convert an operand for 0-dim tensors to an operand for the vector that contains them.

    Returns:
        The operand for a foreach operator, or None if the operand cannot be converted.
    """
    if isinstance(x, Tensor) and x.dim() < 2:
        return [x.to(vector.dtype)]
    return x if isinstance(x, (int, float)) else None


def foreach(name: str, tensors: list[Tensor], args: Sequence[Any], in_place: bool = False) -> Any:
    """Run a foreach operator of torch, with as few calls as possible.

    Args:
        name: The name of the operator, without "_foreach_". Two more names are allowed: "clamp",
            and "add_scaled" for add with `alpha`.
        tensors: The tensors.
        args: The operands, from `arguments`.
        in_place: Whether the operator writes the tensors. Otherwise it returns new tensors.
    """
    if name == "clamp":
        raised = foreach("clamp_min", tensors, args[:1], in_place)
        foreach("clamp_max", tensors if in_place else raised, args[1:], in_place=True)
        return raised
    if not in_place and (dtype := _wider(tensors, args)) is not None:
        tensors = copies(tensors, dtype)
        foreach(name, tensors, args, in_place=True)
        return tensors
    if len(tensors) > 1 and _uneven(tensors, args):
        return _in_packs(name, tensors, args, in_place)
    options: dict[str, Any] = {}
    if name == "add_scaled":
        name = "add"
        options["alpha"] = args[1]
        args = args[:1]
    if in_place:
        name += "_"
    return torch_private.foreach(name, tensors, *args, **options)


def _wider(tensors: list[Tensor], args: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype of the result if the list is in half precision and an operand is wider.

    Returns:
        None if the result has the dtype of the list, or if the tensors do not share calls.
    """
    if tensors[0].dtype not in HALF or not shares(tensors):
        return None
    firsts = [x[0] for x in args if isinstance(x, list) and isinstance(x[0], Tensor)]
    return next((x.dtype for x in firsts if x.dim() and _narrower(tensors[0], x)), None)


def _uneven(tensors: list[Tensor], args: Sequence[Any]) -> bool:
    """Return whether the tensors could share a call, but their operands prevent it.

    torch makes a call per tensor if an operand has another shape or precision than its tensor.
    """
    lists = [x for x in args if isinstance(x, list) and isinstance(x[0], Tensor)]
    if not (lists and shares(tensors)):
        return False
    if any([_narrower(row[0], tensors[0]) for row in lists]):
        return True
    return any([x.shape != t.shape for row in lists for x, t in zip(row, tensors, strict=True)])


def _narrower(x: Tensor, t: Tensor) -> bool:
    """Return whether x is in half precision and t is not."""
    return x.dtype in HALF and t.dtype not in HALF


def _in_packs(name: str, tensors: list[Tensor], args: Sequence[Any], in_place: bool) -> Any:
    """Run `foreach` for packs of small tensors, with operands in the shapes of the tensors."""
    has_rows = any([isinstance(x, list) and any(map(Tensor.dim, x)) for x in args])
    forms = [(t.dtype, t.shape) for t in tensors] if has_rows else None

    def run(pack: list[int]) -> Any:
        members = [tensors[i] for i in pack]
        operands = [[x[i] for i in pack] if isinstance(x, (list, tuple)) else x for x in args]
        if len(pack) > 1:
            operands = [_evened(x, members) for x in operands]
        return foreach(name, members, operands, in_place) or members

    return in_order(packs(tensors, forms), run)


def _evened(x: Any, tensors: Sequence[Tensor]) -> Any:
    """Convert an operand to the tensors' shapes, and to full precision if the tensors have it."""
    if not isinstance(x, list) or not isinstance(x[0], Tensor):
        return x
    if all([a.shape == t.shape for a, t in zip(x, tensors, strict=True)]):
        return copies(x, tensors[0].dtype) if _narrower(x[0], tensors[0]) else x
    return expanded(x, tensors)


def stand_in(name: str, tensors: list[Tensor], rows: Sequence[list[Any]]) -> list[Tensor]:
    """Run an operator of `STAND_INS`, with as few calls as possible.

    Args:
        name: The name of the operator.
        tensors: The tensors.
        rows: For each operand, a list with a tensor or number for each tensor.
    """
    operator = STAND_INS[name]
    columns = [tensors, *rows]
    if not shares(tensors):
        return [operator(*row) for row in zip(*columns, strict=True)]

    def alone(i: int) -> Tensor:
        return operator(*[column[i] for column in columns])

    def together(pack: Sequence[int]) -> list[Tensor]:
        members = [tensors[i] for i in pack]
        operands = [_packed([column[i] for i in pack], members) for column in columns]
        return unpacked(operator(*operands), members)

    return in_packs(tensors, None, alone, together)


def fill_(tensors: list[Tensor], masks: Sequence[Tensor], value: Any) -> None:
    """Write a value into the elements whose mask is set."""
    if isinstance(value, Tensor):
        value = value.reshape(())  # masked_fill_ accepts no other tensor
    if not shares(tensors):
        for t, mask in zip(tensors, masks, strict=True):
            t.masked_fill_(mask, value)
        return
    for pack in packs(tensors):
        if len(pack) == 1:
            tensors[pack[0]].masked_fill_(masks[pack[0]], value)
            continue
        members = [tensors[i] for i in pack]
        mask = _packed([masks[i] for i in pack], members)
        filled = _packed(members, members).masked_fill_(mask, value)
        torch_private.foreach("copy_", members, unpacked(filled, members))


def _packed(column: list[Any], tensors: list[Tensor]) -> Any:
    """Join the operands of the tensors of a pack into one operand for the pack."""
    first = column[0]
    if all([x is first for x in column]) and not (isinstance(first, Tensor) and first.dim()):
        return first
    return torch.cat([x.expand(t.shape).reshape(-1) for x, t in zip(column, tensors, strict=True)])


def copy_into(target: list[Tensor], source: Sequence[Tensor]) -> None:
    """Copy the values of tensors into other tensors."""
    if target and is_sharded(target[0]):  # torch has no _foreach_copy_ for DTensor
        for t, s in zip(target, source, strict=True):
            t.copy_(s)
    else:
        torch_private.foreach("copy_", target, list(source))
