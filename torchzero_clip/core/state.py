"""State: its dtypes, and the tensors that it begins with and is held in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import share_memory

DOUBLE = (torch.float64, torch.complex128)
HALF = (torch.float16, torch.bfloat16)
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes that float32 state in the shape of a parameter may be kept in, by name."""


def state_dtype(param: Tensor) -> torch.dtype:
    """float32 for half precision (an average in bfloat16 stalls), otherwise the parameter's own."""
    return torch.float32 if param.dtype in HALF else param.dtype


def zeros_like_state(param: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Zeros in the shape of a parameter, or in another one, and in the dtype of its state."""
    if shape is None:
        return torch.zeros_like(param, dtype=state_dtype(param))
    return torch.zeros(tuple(shape), dtype=state_dtype(param), device=param.device)


def averages_of(param: Tensor, *names: str) -> dict[str, Tensor]:
    """The state of averages before the first step: its count, and zeros under each name."""
    return {"step": counter(param), **{name: zeros_like_state(param) for name in names}}


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


def share_vectors(states: Sequence[dict[str, Any]], keys: Iterable[str]) -> None:
    """Make the 0-dim tensors under each key the entries of one vector."""
    for key in keys:
        some = [state for state in states if isinstance(state.get(key), Tensor)]
        row = [state[key] for state in some]
        if row and not any(map(Tensor.dim, row)) and len(set(map(id, row))) == len(row):
            for state, t in zip(some, share_memory(row), strict=True):
                state[key] = t
