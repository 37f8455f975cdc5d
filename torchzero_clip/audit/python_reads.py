"""Python reads: make a ledger see what Python does with fake tensors without torch's operators.

For example, `print(x)` copies a tensor to the host, but no operator does this copy. If the device
has no guard, torch also cannot index, move or read a tensor by the usual methods. The functions of
this module replace all these methods by calls of operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchzero_clip.core.torch_private import fake_mode, without_modes

aten = torch.ops.aten


class PythonReads(TorchFunctionMode):
    """A context manager inside which methods of fake tensors call operators.

    Args:
        guarded: Whether the device has a guard.
    """

    def __init__(self, guarded: bool) -> None:
        super().__init__()
        self._replacements = SHOWING_VALUES if guarded else SHOWING_VALUES | NEEDING_A_GUARD

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = self._replacements.get(getattr(func, "__name__", ""))
        tensors = [x for x in args if isinstance(x, Tensor)]
        if replacement is None or not tensors or fake_mode(tensors[0]) is None:
            return func(*args, **(kwargs or {}))
        return replacement(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- methods that show values


def _repr(x: Tensor, **options: Any) -> str:
    x.cpu()
    return str(Tensor.__repr__(x, **options))  # type: ignore[no-untyped-call]


def _format(x: Tensor, spec: str) -> str:
    return format(_repr(x) if x.dim() else x.item(), spec)


def _numpy(x: Tensor, *_: Any, **__: Any) -> Any:
    if x.is_cuda:
        raise TypeError("can't convert cuda:0 device type tensor to numpy: call .cpu() first")
    with without_modes():
        return torch.ones(x.shape, dtype=x.dtype).numpy()


def _data_ptr(x: Tensor) -> int:
    start: int = getattr(x.untyped_storage(), "address", 0)
    return start + int(x.storage_offset()) * x.element_size()


SHOWING_VALUES: dict[str, Callable[..., Any]] = {
    "__repr__": _repr,
    "__format__": _format,
    "numpy": _numpy,
    "__array__": _numpy,
    "data_ptr": _data_ptr,
}

# ---------------------------------------------------------------------- methods that need a guard


def _get(x: Tensor, index: Any) -> Tensor:
    """Return x[index]. Views are made dim by dim, then all tensors and masks index together."""
    index = index if isinstance(index, tuple) else (index,)
    indexed_dims = sum([_dims(i) for i in index])
    dim = 0
    chosen: list[Tensor | None] = []
    for i in _without_ellipsis(index, x.dim() - indexed_dims):
        if i is None:
            x = aten.unsqueeze(x, dim)
        elif isinstance(i, slice):
            x = x if i == slice(None) else aten.slice(x, dim, i.start, i.stop, i.step or 1)
        elif isinstance(i, (Tensor, list)):
            chosen += [None] * (dim - len(chosen))
            chosen.append(torch.as_tensor(i))
        else:
            x = aten.select(x, dim, int(i))
            continue
        dim += 1 if i is None else _dims(i)
    return aten.index(x, chosen) if chosen else x


def _set(x: Tensor, index: Any, value: Any) -> None:
    index = index if isinstance(index, tuple) else (index,)
    if any([isinstance(i, (Tensor, list)) for i in index]):
        places = [torch.as_tensor(i) for i in index]
        aten.index_put_(x, places, torch.as_tensor(value, dtype=x.dtype))
    elif isinstance(value, Tensor):
        aten.copy_(_get(x, index), value)
    else:
        aten.fill_(_get(x, index), value)


def _dims(i: Any) -> int:
    """Return the number of tensor dims that one part of an index uses."""
    if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8):
        return i.dim()
    return 0 if i is None or i is ... else 1


def _without_ellipsis(index: tuple[Any, ...], rest: int) -> list[Any]:
    """Return an index with `rest` full slices in place of `...`."""
    full: list[Any] = []
    for i in index:
        full += [slice(None)] * rest if i is ... else [i]
    return full


def _to(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return x.to(device, dtype, non_blocking, copy). All forms of the arguments are accepted."""
    wanted = {"device": x.device, "dtype": x.dtype, **options}
    for value in arguments:
        if isinstance(value, Tensor):
            wanted |= {"device": value.device, "dtype": value.dtype}
        elif isinstance(value, torch.dtype):
            wanted["dtype"] = value
        elif not isinstance(value, bool) and value is not None:
            wanted["device"] = torch.device(value)
    device = torch.device(wanted["device"] or x.device)
    dtype = wanted["dtype"] or x.dtype
    if device.type == x.device.type:
        return Tensor.to(x, dtype, copy=wanted.get("copy", False))
    moved = torch.empty(x.shape, dtype=dtype, device="cuda:0" if device.type == "cuda" else device)
    return aten.copy_(moved, x, wanted.get("non_blocking", False))


def _cuda(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return _to(x, *(arguments or ("cuda:0",)), **options)


def _copy(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if source.is_cuda and x.is_cuda:
        return aten.copy_(x, aten.view(source, source.shape), non_blocking)
    return aten.copy_(x, source, non_blocking)


NEEDING_A_GUARD: dict[str, Callable[..., Any]] = {
    "__getitem__": _get,
    "__setitem__": _set,
    "__float__": lambda x: float(x.item()),
    "__int__": lambda x: int(x.item()),
    "__bool__": lambda x: bool(x.item()),
    "__index__": lambda x: int(x.item()),
    "to": _to,
    "cuda": _cuda,
    "copy_": _copy,
    "nonzero": aten.nonzero,
    "__invert__": aten.bitwise_not,
}
