"""Check the arguments of `Recover` and of its methods."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from torchzero_clip.attach.handle import Attached
from torchzero_clip.core.sharding.layout import full
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.averages import params_of


def need(condition: Any, message: str, kind: type[Exception] = ValueError) -> None:
    """Raise an error with this message unless the condition holds."""
    if not condition:
        raise kind(f"Recover: {message}")


def check_run(opt: Any, model: Any, parts: Any) -> list[Any]:
    """Check the optimizer, the model and the parts of a run, and return the parts as a list."""
    steps = isinstance(opt, (Modular, Attached))
    message = (
        f"optimizer must be a Modular or the handle that attach returned, got {type(opt).__name__}"
    )
    need(steps, message, TypeError)
    message = f"model must be the torch.nn.Module that the optimizer trains, got {_kind(model)}"
    need(isinstance(model, Module), message, TypeError)
    trained = set(params_of(opt))
    message = (
        "model must be the model that the optimizer trains, got a model that has none of the "
        "optimizer's parameters"
    )
    need(not trained or any([p in trained for p in model.parameters()]), message)
    is_list = isinstance(parts, Iterable) and not hasattr(parts, "state_dict")
    message = f"parts must be a list, such as parts=[schedule], got {_kind(parts)}"
    need(is_list, message, TypeError)
    parts = list(parts)
    for part in parts:
        has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        message = (
            "parts must contain only objects with the methods state_dict and load_state_dict, got "
            f"{_kind(part)}"
        )
        need(has_state, message, TypeError)
    return parts


def check_numbers(options: dict[str, Any]) -> None:
    """Check the numeric arguments of `Recover`, each alone and all together."""
    for name, value in options.items():
        if name == "sigmas":
            is_valid = type(value) in (int, float) and value >= 0
            need(is_valid, f"sigmas must be a number of at least 0, got {value!r}")
        else:
            least = 2 if name == "window" else 1
            is_valid = type(value) is int and value >= least
            need(is_valid, f"{name} must be an integer of at least {least}, got {value!r}")
    every = options["every"]
    check = options["check"]
    message = (
        f"every={every} must be a multiple of check={check}, the number of steps between two checks"
    )
    need(every % check == 0, message)


def check_slower(opt: Modular | Attached, slower: Any) -> tuple[float, int]:
    """Check the argument `slower`, and return the factor and the number of steps."""
    message = (
        f"slower= must be a pair (factor, steps), such as (0.5, 100), got {slower!r}. The "
        "factor of the learning rate must be above 0 and at most 1, and the number of steps "
        "must be at least 0"
    )
    need(isinstance(slower, (tuple, list)) and len(slower) == 2, message)
    factor, steps = slower
    need(type(factor) in (int, float) and 0 < factor <= 1, message)
    need(type(steps) is int and steps >= 0, message)
    has_rate = factor == 1 or "lr" in opt.defaults or isinstance(opt, Attached)
    need(has_rate, "slower= requires a learning rate: add LR at the end of the chain")
    return factor, steps


def loss_of(loss: Any) -> Tensor | float | None:
    """Check the loss of a step, and return it as a plain 0-dim tensor, a float, or None."""
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return full(loss.detach()).reshape(())
    message = f"loss must be a number, a tensor with one element, or None, got {loss!r}"
    if isinstance(loss, Tensor):
        need(not loss.is_complex(), f"loss must be real, got a tensor of {loss.dtype}", TypeError)
        message = f"loss must have one element, got a tensor of shape {tuple(loss.shape)}"
    need(isinstance(loss, numbers.Real), message, TypeError)
    return float(loss)


def _kind(x: Any) -> str:
    return type(x).__name__
