"""The dtypes of state, and functions that create tensors of state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import share_memory, shared_memory

DOUBLE = (torch.float64, torch.complex128)
HALF = (torch.float16, torch.bfloat16)
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes in which float32 state in the shape of a parameter may be stored, by name."""


def state_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's state.

    It is float32 for half precision, because averages stall in half precision. Otherwise it is the
    dtype of the parameter.
    """
    return torch.float32 if param.dtype in HALF else param.dtype


def zeros_like_state(param: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return zeros in the dtype of a parameter's state: float32 for half precision.

    Args:
        param: The parameter. If it is not in half precision, the zeros have its dtype.
        shape: The shape of the zeros, if it is not the shape of the parameter.
    """
    if shape is None:
        return torch.zeros_like(param, dtype=state_dtype(param))
    return torch.zeros(tuple(shape), dtype=state_dtype(param), device=param.device)


def averages_of(param: Tensor, *names: str) -> dict[str, Tensor]:
    """Return the initial state of averages: a step count, and zeros under each name."""
    return {"step": counter(param), **{name: zeros_like_state(param) for name in names}}


def counter(param: Tensor) -> Tensor:
    """Return a step count of zero for a parameter, in float32 as in torch's optimizers."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def statistic_dtype(param: Tensor) -> torch.dtype:
    """Return the dtype of scalars in state: float64 for float64 parameters, otherwise float32."""
    return torch.float64 if param.dtype in DOUBLE else torch.float32


def statistic(value: Any, param: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a value of state on the device of its parameter. Numbers become 0-dim tensors."""
    if isinstance(value, Tensor):
        return value.to(param.device, dtype if dtype is not None else value.dtype)
    is_number = isinstance(value, Number)
    if not is_number:
        raise TypeError(f"init and init_unit must return tensors or numbers, got {value!r}")
    return torch.full((), value, dtype=dtype or statistic_dtype(param), device=param.device)


def share_vectors(
    states: Sequence[dict[str, Any]],
    keys: Iterable[str],
    before: Callable[[str], None] | None = None,
) -> None:
    """Replace the 0-dim tensors under each key by the elements of one vector.

    Tensors that are already consecutive elements of a vector are not replaced.

    Args:
        states: The state of some parameters, in order.
        keys: The keys.
        before: A function that is called with a key before the tensors under this key are replaced.
    """
    for key in keys:
        having = [state for state in states if isinstance(state.get(key), Tensor)]
        tensors = [state[key] for state in having]
        if shared_memory(tensors) is not None:  # first, because this is true in most steps
            continue
        distinct = len(set(map(id, tensors))) == len(tensors)
        if any(map(Tensor.dim, tensors)) or not distinct:
            continue
        elements = share_memory(tensors)
        if not tensors or elements[0] is tensors[0]:
            continue
        if before is not None:
            before(key)
        for state, t in zip(having, elements, strict=True):
            state[key] = t
