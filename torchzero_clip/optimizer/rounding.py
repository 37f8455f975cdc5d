"""Rounding: the update of parameters in half precision, and exact weights.

With rounding="exact", a bfloat16 parameter is the upper half of an exact float32 weight. The state
of the parameter has the lower half.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchzero_clip.core.formats import KEPT, ROUNDINGS, Exact, lower, upper, wide_of
from torchzero_clip.core.formats.stochastic import DROPPED
from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.core.state import STATE_DTYPES


def check_options(
    owner: str, fused: Any, compile: Any, rounding: Any, state_dtype: Any, group: Any
) -> None:
    """Raise an error unless all options of an optimizer have valid values."""
    texts = ("rounding", rounding, ROUNDINGS), ("state_dtype", state_dtype, tuple(STATE_DTYPES))
    for name, value, choices in texts:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{owner}: {name} must be one of {choices}, got {value!r}")
    process_group_class = getattr(torch.distributed, "ProcessGroup", object)
    if group is not None and not isinstance(group, process_group_class):
        expected = f"a ProcessGroup, such as mesh.get_group(), or None, got {group!r}"
        raise TypeError(f"{owner}: process_group must be {expected}")
    for name, value in (("fused", fused), ("compile", compile)):
        if not isinstance(value, bool):
            raise TypeError(f"{owner}: {name} must be True or False, got {value!r}")


def refuse_float16(owner: str, rounding: str, group: Mapping[str, Any]) -> None:
    """Raise an error if rounding="exact" is used with parameters in float16."""
    if rounding == "exact" and any([p.dtype == torch.float16 for p in group["params"]]):
        raise ValueError(
            f"{owner}: rounding='exact' does not support parameters in float16: use "
            "rounding='kahan', or parameters in bfloat16"
        )


def drop_unused(dtype: torch.dtype, states: Iterable[dict[str, Any]]) -> None:
    """Drop what a rounding keeps next to parameters, if their dtype is not in half precision.

    If the parameters return to half precision later, old values would not fit the new weights.
    """
    if dtype in DROPPED:
        return
    for state in states:
        for form in KEPT.values():
            state.pop(form.key, None)


def has_half_precision(optimizer: Any) -> bool:
    """Return whether an optimizer trains parameters in half precision."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return any([p.dtype in DROPPED and p.requires_grad for p in params])


# ---------------------------------------------------------------------- float32 weights


def is_exact(optimizer: Any, p: Tensor) -> bool:
    """Return whether a parameter is only the upper half of a float32 weight."""
    return optimizer.rounding == "exact" and p.dtype in DROPPED


def weights_of(optimizer: Any, p: Tensor) -> Tensor:
    """Return the weights that links receive: the local part, if a parameter is sharded."""
    if not is_exact(optimizer, p):
        return local(p)
    rest = optimizer.state.get(p, {}).get(Exact.key)
    return local(p).float() if rest is None else wide_of(local(p), local(rest))


def in_model(owner: str, model: Module, weights: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    """Return the state dict of a model, with other weights in place of the parameters.

    Args:
        owner: The name of the public method, for error messages.
        model: The model.
        weights: The local weights of each parameter.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for key, p in tensors_of(owner, model, weights).items():
        layout = layout_of(p)
        value = weights.get(p, p)
        state[key] = (value if layout is None or value is p else layout.wrap(value)).detach()
    return state


def tensors_of(owner: str, model: Module, trained: Container[Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, by key.

    Raise an error if the model contains no trained parameter.
    """
    tensors = {k: t for k, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    if not any([t in trained for t in tensors.values()]):
        raise ValueError(
            f"{owner}: model must be the model that this optimizer trains, got a model that has "
            "none of the optimizer's parameters"
        )
    return tensors


@torch.no_grad()
def split(p: Tensor, x: Tensor, state: dict[str, Any]) -> None:
    """Split float32 weights: store the upper half in the parameter, the lower half in the state."""
    x = x.to(p.device, torch.float32)
    local(p).copy_(upper(x))
    rest = state.setdefault(Exact.key, torch.zeros_like(p, dtype=Exact.dtype))
    local(rest).copy_(lower(x))


def halves_as_bytes(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return state with the lower halves as bytes, because a state dict stores them as bytes.

    The lower halves are 16-bit integers. NCCL and gloo cannot send 16-bit integers, so
    `StateDictOptions(full_state_dict=True)` could not gather them. The bytes have one more
    dimension at the end. They share the memory of the integers.
    """
    return {key: _in_bytes(of_param) for key, of_param in state.items()}


def _in_bytes(of_param: Any) -> Any:
    """Return the state of one parameter with the lower half as bytes."""
    if not (isinstance(of_param, Mapping) and isinstance(of_param.get(Exact.key), Tensor)):
        return of_param
    rest = of_param[Exact.key]
    if rest.dtype != Exact.dtype:
        return of_param
    layout = layout_of(rest)
    half = local(rest).detach().unsqueeze(-1).view(torch.uint8)
    if layout is not None:
        half = replace(layout, shape=(*layout.shape, rest.element_size())).wrap(half)
    return {**of_param, Exact.key: half}


def halves_as_integers(of_param: Any) -> Any:
    """Return the state of one parameter with the lower half as 16-bit integers."""
    half = of_param.get(Exact.key) if isinstance(of_param, Mapping) else None
    if not (isinstance(half, Tensor) and half.dtype == torch.uint8 and half.shape[-1:] == (2,)):
        return of_param
    layout = layout_of(half)
    part = local(half)
    part = part if part.stride(-1) == 1 else part.contiguous()
    rest = part.view(Exact.dtype).squeeze(-1)
    if layout is not None:
        rest = replace(layout, shape=layout.shape[:-1]).wrap(rest)
    return {**of_param, Exact.key: rest}
