"""Questions to a tensor: may it be read, in which dtype is it summed, by which scale is it divided.

Reading a number back from a *CPU* tensor is free: `readable` says where it may be done.
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

PIECE = 2**20  # numbers of a tensor on CPU that are worked on at a time
F = TypeVar("F", bound=Callable[..., Any])


def readable(x: Tensor) -> bool:
    """Whether values can be read without waiting for a device: plain tensors on CPU, where no
    TorchFunctionMode says that they stand for others.
    """
    plain = x.is_cpu and type(x) in REAL and not torch.compiler.is_compiling()
    if plain and has_torch_function_unary(x):
        return bool(handle_torch_function(readable, (x,), x))
    return plain


def at_least_float32(x: Tensor) -> Tensor:
    """At least float32: on CPU, dtype= alone would still sum in half precision."""
    return x.float() if x.dtype in HALF else x


def safe_scale(scale: Tensor) -> Tensor:
    """A scale to divide by: 1 where it is 0, infinite or NaN."""
    return scale.masked_fill(~((scale > 0) & (scale < math.inf)), 1)


def finite(x: Tensor) -> Tensor:
    """Where x is neither infinite nor NaN: two calls, of which torch's own makes four."""
    return x.abs() < math.inf


def as_one_operator(f: F) -> F:
    """A function that may look at what tensors hold: a TorchFunctionMode sees it as a whole."""

    @functools.wraps(f)
    def seen(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_torch_function_unary(x):
            return f(x, *args, **kwargs)
        return handle_torch_function(seen, (x,), x, *args, **kwargs)

    seen.one_operator = True  # type: ignore[attr-defined]
    return cast(F, seen)


def is_one_operator(function: Any) -> bool:
    """Whether it is such a function."""
    return getattr(function, "one_operator", False)


@as_one_operator
def vector_norm(x: Tensor, p: float) -> Tensor:
    """p-norm along the last dim, in the range that its result has."""
    if readable(x) and x.dtype == torch.float64 and p <= 6:
        norm = torch.linalg.vector_norm(x, p, dim=-1)
        if all([1e-40 < n < 1e40 for n in norm.view(-1).tolist()]):
            return norm
    ends = torch.finfo(x.dtype)  # what is infinite or no number stays so
    safe = x.amax(dim=-1, keepdim=True).clamp(ends.tiny, ends.max)
    return (torch.linalg.vector_norm(x / safe, p, dim=-1, keepdim=True) * safe).squeeze(-1)


@as_one_operator
def eps_of(x: Tensor, dtype: torch.dtype) -> float:
    """The step from 1 to the next number of a dtype, in which `x` was measured."""
    return torch.finfo(dtype).eps


def numbers(values: Sequence[float], like: Tensor | torch.device) -> Tensor:
    """A vector of known numbers on a device, without a copy from the host that would wait."""
    at = like if isinstance(like, torch.device) else like.device
    dtype = wide(at) if isinstance(like, torch.device) else like.dtype
    if at.type == "cpu":
        return torch.tensor(values, dtype=dtype, device=at)
    out = torch.zeros(len(values), dtype=dtype, device=at)
    foreach("add_", list(out.unbind()), [float(v) for v in values])
    return out
