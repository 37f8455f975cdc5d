"""State: its dtypes, and the tensors that it begins with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DOUBLE = (torch.float64, torch.complex128)
HALF = (torch.float16, torch.bfloat16)
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes that float32 state in the shape of a parameter may be kept in, by name."""


def state_dtype(param: Tensor) -> torch.dtype:
    """float32 for half precision (an average in bfloat16 stalls), otherwise the parameter's own."""
    return torch.float32 if param.dtype in HALF else param.dtype


def zeros_like_state(param: Tensor) -> Tensor:
    """Zeros in the shape of a parameter and the dtype of its state."""
    return torch.zeros_like(param, dtype=state_dtype(param))


def counter(param: Tensor) -> Tensor:
    """A step count for a parameter, in float32 as torch's own."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def statistic_dtype(param: Tensor) -> torch.dtype:
    """The dtype of single numbers in state: float32, or float64 for a double parameter."""
    return torch.float64 if param.dtype in DOUBLE else torch.float32


def statistic(value: Any, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A value of state on the device of its parameter: numbers become 0-dim tensors."""
    if isinstance(value, Tensor):
        return value.to(param.device, dtype if dtype is not None else value.dtype)
    return torch.full((), value, dtype=dtype or statistic_dtype(param), device=param.device)
