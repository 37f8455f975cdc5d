"""Saving and loading of exact weights: the float32 weights that rounding="exact" keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.optimizer.averages import params_of, refuse
from torchzero_clip.optimizer.rounding import in_model, split, tensors_of, weights_of


@torch.no_grad()
def exact_state_dict(optimizer: Any, model: Module) -> dict[str, Any]:
    """Return the model's state dict with the exact weights, which are in float32.

    Args:
        model: The model that is trained.
    """
    _check("exact_state_dict", optimizer)
    weights = {p: weights_of(optimizer, p) for p in params_of(optimizer)}
    return in_model("exact_state_dict", model, weights)


@torch.no_grad()
def load_exact(optimizer: Any, model: Module, state: Mapping[str, Any]) -> None:
    """Load float32 weights into a bfloat16 model. The optimizer keeps the bits that do not fit.

    A state dict that does not fit raises `ValueError` before anything changes.

    Args:
        model: The model that is trained.
        state: The result of `exact_state_dict`, or any state dict of the model in float32.
    """
    _check("load_exact", optimizer)
    trained = set(params_of(optimizer))
    tensors = tensors_of("load_exact", model, trained)
    _check_fit(model, state)
    model.load_state_dict(state)
    for key, p in tensors.items():
        if p in trained and p.dtype == torch.bfloat16:
            split(p, local(state[key]), optimizer.state[p])


def _check_fit(model: Module, state: Any) -> None:
    """Raise an error unless the state dict has the keys, shapes and shards of the model.

    torch checks the state dict while it copies. An error in torch would leave some weights changed.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_exact: state must be a state dict, got {type(state).__name__}")
    own = model.state_dict(keep_vars=True)
    if state.keys() != own.keys():
        missing = sorted(own.keys() - state.keys())
        unknown = sorted(map(str, state.keys() - own.keys()))
        raise ValueError(
            "load_exact: the state dict must have the same keys as the model; missing keys: "
            f"{missing or 'none'}, unexpected keys: {unknown or 'none'}"
        )
    for key, t in own.items():
        value = state[key]
        if not isinstance(t, Tensor):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"load_exact: {key!r} must be a tensor, got {type(value).__name__}")
        if value.shape != t.shape:
            raise ValueError(
                f"load_exact: {key!r} has shape {tuple(value.shape)} in the state dict, but "
                f"shape {tuple(t.shape)} in the model"
            )
        if layout_of(value) != layout_of(t):
            raise ValueError(
                f"load_exact: {key!r} must be sharded in the state dict in the same way as in "
                "the model: distribute the tensor first, for example with "
                "torch.distributed.tensor.distribute_tensor"
            )


def _check(owner: str, optimizer: Any) -> None:
    """Raise an error unless each parameter is the upper half of a float32 weight."""
    refuse(optimizer, f"{owner}()", shown=True)
    if optimizer.rounding != "exact":
        raise ValueError(
            f"{owner}: the optimizer must be constructed with rounding='exact' to have float32 "
            f"weights, got rounding={optimizer.rounding!r}"
        )
