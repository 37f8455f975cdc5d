"""What rounding loses of a step: twins of the parameters in float32 take it beside them, on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip.core.sharding.layout import local

HALF = (torch.bfloat16, torch.float16)
MOST = 2**22  # entries that take the step: of more, the first rows of each tensor


@dataclass(frozen=True)
class Lost:
    """What a step does to parameters in half precision, beside the same in float32.

    Attributes:
        moving: The entries that the step moves in float32.
        stayed: Those of them that stay where they are in half precision.
        rounding: How the optimizer says that it rounds; "" where it says nothing.
        ended: Why the step could not be done on the CPU, where it could not.
    """

    moving: int = 0
    stayed: int = 0
    rounding: str = ""
    ended: str = ""

    @property
    def share(self) -> float:
        """Of the entries that move in float32, those that stay."""
        return self.stayed / max(self.moving, 1)

    def __str__(self) -> str:
        if self.ended:
            return f"What rounding loses was not seen, since on a CPU the step ends: {self.ended}"
        told = f"Of {self.moving:,} entries that it moves in float32, {self.share:.0%} stay in half"
        if self.rounding in ("", "nearest"):
            return f"{told} precision: lost in rounding, but for what is kept beside the weights."
        return f'{told} precision, for which rounding="{self.rounding}" makes up later.'


def lost_in(make: Callable[[Any], Any], rows: Sequence[Any]) -> Lost | None:
    """What a step loses in rounding; None where none is in half precision, or one has no values."""
    params = [x[1] if isinstance(x, tuple) else x for x in rows]
    if not any([p.dtype in HALF for p in params]) or any([p.is_meta for p in params]):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _beside(make, rows, _sample(params))
    except Exception as error:  # whatever it is, the rest of the report holds
        return Lost(ended=f"{type(error).__name__}: {error}".partition("\n")[0])


def _beside(make: Callable[[Any], Any], rows: Sequence[Any], low: Sequence[Parameter]) -> Lost:
    """A step of parameters as they are, and of the same in float32."""
    high = [Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in low]
    for one, other in zip(low, high, strict=True):
        other.grad = None if one.grad is None else one.grad.float()
    before = [p.detach().clone() for p in low]
    made = [_stepped(make, rows, twins) for twins in (high, low)]
    moving = stayed = 0
    for p, w, at in zip(low, high, before, strict=True):
        if p.dtype in HALF:
            moves = w != at.float()
            moving += int(moves.sum())
            stayed += int((moves & (p == at)).sum())
    return Lost(moving, stayed, str(getattr(made[1], "rounding", "")))


def _sample(params: Sequence[Tensor]) -> list[Parameter]:
    """Parameters on CPU with gradients: those that are there, or such of norm 1 together."""
    entries = max(sum([p.numel() for p in params]), 1)
    made = []
    for p in params:
        values, grad = local(p).detach(), None if p.grad is None else local(p.grad)
        at = slice(-(-len(values) * MOST // entries)) if values.dim() and entries > MOST else ...
        moves = p.requires_grad or not isinstance(p, Parameter)
        made.append(Parameter(values[at].cpu().clone(), requires_grad=moves))
        if moves:
            drawn = torch.randn(made[-1].shape) / min(entries, MOST) ** 0.5
            made[-1].grad = (drawn if grad is None else grad[at].cpu().clone()).to(p.dtype)
    return made


def _stepped(make: Callable[[Any], Any], rows: Sequence[Any], twins: Sequence[Any]) -> Any:
    """What makes steps, after one of it."""
    pairs = zip(rows, twins, strict=True)
    made = make([(x[0], t) if isinstance(x, tuple) else t for x, t in pairs])
    for group in getattr(made, "param_groups", []):
        if group.get("capturable"):
            group["capturable"] = False  # which torch has for accelerators alone
    step = getattr(made, "step", made)
    step()
    return made
