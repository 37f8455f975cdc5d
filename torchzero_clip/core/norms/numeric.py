"""Numerics: functions that keep norms accurate and in range, and that avoid synchronization.

Reading a value of a CPU tensor on the host does not synchronize with a device. `readable` returns
whether a tensor may be read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from torchzero_clip.core.state import HALF
from torchzero_clip.core.tensor_kinds import REAL, wide
from torchzero_clip.core.torch_private import foreach

PIECE = 2**20
"""The number of elements of a CPU tensor that are processed at once."""
F = TypeVar("F", bound=Callable[..., Any])


def readable(x: Tensor) -> bool:
    """Return whether the values of a tensor can be read on the host without synchronization.

    This holds for plain tensors on CPU. A TorchFunctionMode may change the result to False, if the
    CPU tensors of the mode are placeholders for other tensors.
    """
    plain = x.is_cpu and type(x) in REAL and not torch.compiler.is_compiling()
    if plain and has_torch_function_unary(x):
        return bool(handle_torch_function(readable, (x,), x))
    return plain


def at_least_float32(x: Tensor) -> Tensor:
    """Convert a tensor in half precision to float32.

    On CPU, some reductions with `dtype=torch.float32` still sum in half precision.
    """
    return x.float() if x.dtype in HALF else x


def safe_scale(scale: Tensor) -> Tensor:
    """Replace the elements of a scale that are 0, infinite or NaN by 1, for a safe division."""
    return scale.masked_fill(~((scale > 0) & (scale < math.inf)), 1)


def finite(x: Tensor) -> Tensor:
    """Return a mask of the elements that are neither infinite nor NaN.

    This function calls two operators, and torch.isfinite calls four.
    """
    return x.abs() < math.inf


def as_one_operator(f: F) -> F:
    """Decorate a function so that a TorchFunctionMode receives one call of it.

    The mode does not receive the calls of torch's operators inside. So the function may read values
    of tensors, although a mode cannot record how the values are used.
    """

    @functools.wraps(f)
    def dispatched(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_torch_function_unary(x):
            return f(x, *args, **kwargs)
        return handle_torch_function(dispatched, (x,), x, *args, **kwargs)

    dispatched.one_operator = True  # type: ignore[attr-defined]
    return cast(F, dispatched)


def is_one_operator(function: Any) -> bool:
    """Return whether a function is decorated with `as_one_operator`."""
    return getattr(function, "one_operator", False)


@as_one_operator
def vector_norm(x: Tensor, p: float) -> Tensor:
    """Return the p-norm along the last dim, without overflow or underflow inside."""
    if readable(x) and x.dtype == torch.float64 and p <= 6:
        norm = torch.linalg.vector_norm(x, p, dim=-1)
        if all([1e-40 < n < 1e40 for n in norm.view(-1).tolist()]):
            return norm
    # with a finite scale, a norm with an infinite or NaN element is still infinite or NaN
    limits = torch.finfo(x.dtype)
    safe = x.amax(dim=-1, keepdim=True).clamp(limits.tiny, limits.max)
    return (torch.linalg.vector_norm(x / safe, p, dim=-1, keepdim=True) * safe).squeeze(-1)


@as_one_operator
def eps_of(x: Tensor, dtype: torch.dtype) -> float:
    """Return the distance from 1 to the next number of a dtype. `x` was computed in this dtype."""
    return torch.finfo(dtype).eps


def numbers(values: Sequence[float], like: Tensor | torch.device) -> Tensor:
    """Return a vector of known numbers. No copy from the host is made, so nothing synchronizes.

    Args:
        values: The numbers.
        like: A tensor with the device and the dtype of the vector, or a device. With a device, the
            dtype is float64, or float32 if the device has no float64.
    """
    if isinstance(like, torch.device):
        device = like
        dtype = wide(like)
    else:
        device = like.device
        dtype = like.dtype
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device=device)
    vector = torch.zeros(len(values), dtype=dtype, device=device)
    foreach("add_", list(vector.unbind()), [float(v) for v in values])
    return vector
