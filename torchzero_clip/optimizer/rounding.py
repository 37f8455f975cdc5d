"""Rounding: how parameters in half precision take their update, and float32 weights behind them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchzero_clip.core.formats import ROUNDINGS, Exact, lower, upper, wide_of
from torchzero_clip.core.formats.stochastic import DROPPED
from torchzero_clip.core.outside import warn
from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.core.state import STATE_DTYPES

WARNED: set[str] = set()  # once a process


def check_options(
    owner: str, fused: Any, compile: Any, rounding: Any, state_dtype: Any, group: Any
) -> None:
    """Raise a sentence unless the options of an optimizer are what they should be."""
    rows = ("rounding", rounding, ROUNDINGS), ("state_dtype", state_dtype, tuple(STATE_DTYPES))
    for name, given, choices in rows:
        if not isinstance(given, str) or given not in choices:
            raise ValueError(f"{owner}: {name} must be one of {choices}, got {given!r}")
    kind = getattr(torch.distributed, "ProcessGroup", object)
    if group is not None and not isinstance(group, kind):
        said = f"a ProcessGroup, as mesh.get_group() is, or None, got {group!r}"
        raise TypeError(f"{owner}: process_group must be {said}")
    for name, given in (("fused", fused), ("compile", compile)):
        if not isinstance(given, bool):
            raise TypeError(f"{owner}: {name} must be True or False, got {given!r}")


def refuse_float16(owner: str, rounding: str, group: Mapping[str, Any]) -> None:
    """Raise a sentence where exact weights are asked for behind float16."""
    if rounding == "exact" and any([p.dtype == torch.float16 for p in group["params"]]):
        raise ValueError(
            f"{owner}: rounding='exact' keeps the lower half of float32 beside bfloat16, and "
            "float16 is no half of it: take rounding='kahan', or parameters in bfloat16"
        )


def warn_of_lost_updates(optimizer: Any) -> None:
    """Warn once, on the first rank, where parameters in half precision round to the nearest, and
    nobody has said so.
    """
    ranks = torch.distributed
    later = ranks.is_available() and ranks.is_initialized() and ranks.get_rank()
    if not (later or WARNED) and narrow(optimizer):
        WARNED.add("lost")
        warn(
            "parameters in half precision lose updates of less than half a unit in the last place: "
            "give rounding='exact' (float32 behind bfloat16, 2 bytes a parameter), 'kahan' (2) or "
            "'stochastic' (0), or 'nearest' where that is meant; metrics() has rounding/lost"
        )


def narrow(optimizer: Any) -> bool:
    """Whether there are parameters in half precision that are trained."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return any([p.dtype in DROPPED and p.requires_grad for p in params])


# ---------------------------------------------------------------------- float32 behind bfloat16


def weights_of(optimizer: Any, p: Tensor) -> Tensor:
    """A parameter as links see it; of a sharded one the part that is here."""
    if optimizer.rounding != "exact" or p.dtype not in DROPPED:
        return local(p)
    rest = optimizer.state.get(p, {}).get(Exact.key)
    return local(p).float() if rest is None else wide_of(local(p), local(rest))


@torch.no_grad()
def exact_state_dict(optimizer: Any, model: Module) -> dict[str, Any]:
    """The model's state dict with the float32 weights that rounding="exact" keeps.

    Args:
        model: The model that is trained.
    """
    _require_exact("exact_state_dict", optimizer)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return in_model("exact_state_dict", model, {p: weights_of(optimizer, p) for p in every})


def in_model(owner: str, model: Module, found: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    """The state dict of a model, with what is here of others in the place of its parameters."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    mine = [key for key, value in state.items() if isinstance(value, Tensor)]
    if not any([state[key] in found for key in mine]):
        raise ValueError(
            f"{owner}: takes the model that this optimizer trains, got one with none of its "
            "parameters"
        )
    for key in mine:
        layout, value = layout_of(state[key]), found.get(state[key])
        value = state[key] if value is None else value if layout is None else layout.wrap(value)
        state[key] = value.detach()
    return state


@torch.no_grad()
def load_exact(optimizer: Any, model: Module, state: Mapping[str, Any]) -> None:
    """Load float32 weights into a model in bfloat16, and what it cannot hold into the optimizer.

    Args:
        model: The model that is trained.
        state: What `exact_state_dict` gave, or any state dict of the model in float32.
    """
    _require_exact("load_exact", optimizer)
    model.load_state_dict(state)
    optimizer.init_state()
    for key, p in model.state_dict(keep_vars=True).items():
        if isinstance(p, Tensor) and Exact.key in optimizer.state.get(p, {}):
            split(local(p), local(optimizer.state[p][Exact.key]), local(state[key]))


def _require_exact(owner: str, optimizer: Any) -> None:
    if optimizer.rounding != "exact":
        raise ValueError(
            f"{owner}: the optimizer was made with rounding={optimizer.rounding!r}, and keeps no "
            "float32 weights behind the parameters: give rounding='exact'"
        )


def split(w: Tensor, rest: Tensor, x: Tensor) -> None:
    """Keep float32 numbers in both halves."""
    x = x.to(w.device, torch.float32)
    w.copy_(upper(x))
    rest.copy_(lower(x))
