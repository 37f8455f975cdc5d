"""Rounding: how parameters in half precision take their update, and float32 weights behind them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from torchzero_clip.core.formats import ROUNDINGS, Exact, lower, upper, wide_of
from torchzero_clip.core.formats.stochastic import DROPPED
from torchzero_clip.core.sharding.layout import layout_of, local
from torchzero_clip.core.state import STATE_DTYPES
from torchzero_clip.core.user_warnings import warn

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


def is_exact(optimizer: Any, p: Tensor) -> bool:
    """Return whether a parameter is only the upper half of a float32 weight."""
    return optimizer.rounding == "exact" and p.dtype in DROPPED


def weights_of(optimizer: Any, p: Tensor) -> Tensor:
    """A parameter as links see it; of a sharded one the part that is here."""
    if not is_exact(optimizer, p):
        return local(p)
    rest = optimizer.state.get(p, {}).get(Exact.key)
    return local(p).float() if rest is None else wide_of(local(p), local(rest))


def in_model(owner: str, model: Module, found: Mapping[Tensor, Tensor]) -> dict[str, Any]:
    """The state dict of a model, with what is here of others in the place of its parameters."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for key, p in tensors_of(owner, model, found).items():
        layout, value = layout_of(p), found.get(p, p)
        state[key] = (value if layout is None or value is p else layout.wrap(value)).detach()
    return state


def tensors_of(owner: str, model: Module, mine: Container[Tensor]) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by key; raises a sentence where none is of mine."""
    tensors = {k: t for k, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    if not any([t in mine for t in tensors.values()]):
        raise ValueError(
            f"{owner}: takes the model that this optimizer trains, got one without its parameters"
        )
    return tensors


@torch.no_grad()
def split(p: Tensor, x: Tensor, state: dict[str, Any]) -> None:
    """Keep float32 numbers in both halves, a parameter and what is beside it in its state."""
    x = x.to(p.device, torch.float32)
    local(p).copy_(upper(x))
    rest = state.setdefault(Exact.key, torch.zeros_like(p, dtype=Exact.dtype))
    local(rest).copy_(lower(x))


def shown_halves(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return state with the lower halves as bytes, as a state dict has them.

    They are 16-bit integers, which NCCL and gloo cannot send, so that
    `StateDictOptions(full_state_dict=True)` could not gather them. The bytes have one dim more, the
    last one, and share the memory.
    """
    return {key: _in_bytes(held) for key, held in state.items()}


def _in_bytes(held: Any) -> Any:
    if not (isinstance(held, Mapping) and isinstance(held.get(Exact.key), Tensor)):
        return held
    rest = held[Exact.key]
    if rest.dtype != Exact.dtype:
        return held
    layout, here = layout_of(rest), local(rest).detach().unsqueeze(-1).view(torch.uint8)
    if layout is not None:
        here = replace(layout, shape=(*layout.shape, rest.element_size())).wrap(here)
    return {**held, Exact.key: here}


def kept_halves(held: Any) -> Any:
    """Return the state of one parameter with lower halves of `shown_halves` as integers again."""
    shown = held.get(Exact.key) if isinstance(held, Mapping) else None
    if not (isinstance(shown, Tensor) and shown.dtype == torch.uint8 and shown.shape[-1:] == (2,)):
        return held
    layout, here = layout_of(shown), local(shown)
    here = here if here.stride(-1) == 1 else here.contiguous()
    rest = here.view(Exact.dtype).squeeze(-1)
    if layout is not None:
        rest = replace(layout, shape=layout.shape[:-1]).wrap(rest)
    return {**held, Exact.key: rest}
