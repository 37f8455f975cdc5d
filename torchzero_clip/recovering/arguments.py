"""Arguments: what `Recover` and its methods accept."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import Module

from torchzero_clip.attach.handle import Attached
from torchzero_clip.optimizer import Modular
from torchzero_clip.optimizer.averages import params_of


def need(fine: Any, sentence: str, kind: type[Exception] = ValueError) -> None:
    """Raise an error with this message unless something is fine."""
    if not fine:
        raise kind(f"Recover: {sentence}")


def check_run(opt: Any, model: Any, parts: Any) -> list[Any]:
    """Return the parts as a list; raise unless these are an optimizer, its model and parts."""
    steps = isinstance(opt, (Modular, Attached))
    given = f"got {type(opt).__name__}"
    need(steps, f"takes a Modular or the handle that attach returned, {given}", TypeError)
    what = f"model must be the torch.nn.Module that the optimizer trains, got {_kind(model)}"
    need(isinstance(model, Module), what, TypeError)
    trained = set(params_of(opt))
    what = "model must be the one that the optimizer trains, got one without its parameters"
    need(not trained or any([p in trained for p in model.parameters()]), what)
    rows = isinstance(parts, Iterable) and not hasattr(parts, "state_dict")
    what = f"parts must be a list, such as parts=[schedule], got {_kind(parts)}"
    need(rows, what, TypeError)
    found = list(parts)
    for part in found:
        has = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        given = f"got {_kind(part)}: what has not goes on as it is"
        need(has, f"parts have state_dict and load_state_dict, {given}", TypeError)
    return found


def check_numbers(given: dict[str, Any]) -> None:
    """Raise unless the numbers of `Recover` make sense, alone and together."""
    for name, value in given.items():
        if name == "sigmas":
            fine = type(value) in (int, float) and value >= 0
            need(fine, f"sigmas must be at least 0, got {value!r}")
        else:
            least = 2 if name == "window" else 1
            fine = type(value) is int and value >= least
            need(fine, f"{name} must be an integer at least {least}, got {value!r}")
    what = f"every must be a multiple of check={given['check']}, the steps between two looks"
    need(given["every"] % given["check"] == 0, f"{what}, got {given['every']}")


def check_slower(opt: Modular | Attached, slower: Any) -> tuple[float, int]:
    """Return a factor for the rate and a number of steps; raise unless these are such."""
    what = "slower must be a factor up to 1 for the rate and a number of steps, as (0.5, 100)"
    pair = isinstance(slower, (tuple, list)) and len(slower) == 2
    need(pair, f"{what}, got {slower!r}")
    factor, steps = slower
    need(type(factor) in (int, float) and 0 < factor <= 1, f"{what}, got {slower!r}")
    need(type(steps) is int and steps >= 0, f"{what}, got {slower!r}")
    rated = factor == 1 or "lr" in opt.defaults or isinstance(opt, Attached)
    need(rated, "slower needs a rate: put LR at the end of the chain")
    return factor, steps


def loss_of(loss: Any) -> Tensor | float | None:
    """Return the loss of a step, a tensor without dims or a number; raise unless it is one."""
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss.detach().reshape(())
    what = f"loss must be a number, a tensor of one, or None, got {loss!r}"
    if isinstance(loss, Tensor):
        what = f"loss must be a tensor of one real number, got one of shape {tuple(loss.shape)}"
        need(not loss.is_complex(), f"loss must be real, got a tensor of {loss.dtype}", TypeError)
    need(isinstance(loss, numbers.Real), what, TypeError)
    return float(loss)


def _kind(x: Any) -> str:
    return type(x).__name__
