"""Lost updates: the share of a step's updates that are lost in rounding.

The share is measured on the CPU, by a comparison with a step in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip.core.sharding.layout import local

HALF = (torch.bfloat16, torch.float16)
SAMPLE_SIZE = 2**22
"""The number of elements that take part in the step. For a larger model, only the first rows of
each tensor take part."""


@dataclass(frozen=True)
class Lost:
    """A comparison of one step in half precision with the same step in float32.

    Attributes:
        moving: The number of elements that the step changes in float32.
        stayed: The number of these elements that the step does not change in half precision.
        rounding: The optimizer's option `rounding`, or "" if the optimizer has none.
        ended: The reason why the step could not run on the CPU, or "" if it ran.
    """

    moving: int = 0
    stayed: int = 0
    rounding: str = ""
    ended: str = ""

    @property
    def share(self) -> float:
        """The share of updates that are lost: `stayed / moving`."""
        return self.stayed / max(self.moving, 1)

    def __str__(self) -> str:
        if self.ended:
            return f"Lost updates are unknown, because the step failed on the CPU: {self.ended}"
        share = (
            f"Of {self.moving:,} elements that a step in float32 changes, {self.share:.0%} do "
            "not change in half precision"
        )
        if self.rounding in ("", "nearest"):
            return f"{share}: their updates are lost, unless the optimizer has float32 weights."
        return f'{share}: rounding="{self.rounding}" corrects this in later steps.'


def lost_in(make: Callable[[Any], Any], named_or_not: Sequence[Any]) -> Lost | None:
    """Return the number of updates of a step that are lost in rounding.

    The result is None if no parameter is in half precision, or if a parameter has no values.

    Args:
        make: A function of the parameters. It returns an optimizer, or a function that does a step.
        named_or_not: Parameters, or pairs of a name and a parameter. `make` receives copies in the
            same form.
    """
    params = [x[1] if isinstance(x, tuple) else x for x in named_or_not]
    if not any([p.dtype in HALF for p in params]) or any([p.is_meta for p in params]):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _compared(make, named_or_not, _sample(params))
    except Exception as error:  # the rest of the report holds, whatever the error is
        return Lost(ended=f"{type(error).__name__}: {error}".partition("\n")[0])


def _compared(
    make: Callable[[Any], Any], named_or_not: Sequence[Any], low: Sequence[Parameter]
) -> Lost:
    """Run a step on parameters and on their float32 copies, and compare which elements change."""
    high = [Parameter(p.detach().float(), requires_grad=p.requires_grad) for p in low]
    for p, copied in zip(low, high, strict=True):
        copied.grad = None if p.grad is None else p.grad.float()
    before = [p.detach().clone() for p in low]
    _after_a_step(make, named_or_not, high)
    optimizer = _after_a_step(make, named_or_not, low)
    moving = 0
    stayed = 0
    for p, copied, old in zip(low, high, before, strict=True):
        if p.dtype in HALF:
            moves = copied != old.float()
            moving += int(moves.sum())
            stayed += int((moves & (p == old)).sum())
    return Lost(moving, stayed, str(getattr(optimizer, "rounding", "")))


def _sample(params: Sequence[Tensor]) -> list[Parameter]:
    """Return copies of the parameters on the CPU, with gradients.

    The copies together have at most about `SAMPLE_SIZE` elements. A parameter without a gradient
    gets a random gradient. The random gradients of all parameters together have a norm of about 1.
    """
    elements = max(sum([p.numel() for p in params]), 1)
    copies = []
    for p in params:
        values = local(p).detach()
        rows: Any = ...
        if values.dim() and elements > SAMPLE_SIZE:
            rows = slice(-(-len(values) * SAMPLE_SIZE // elements))
        trains = p.requires_grad or not isinstance(p, Parameter)
        copied = Parameter(values[rows].cpu().clone(), requires_grad=trains)
        if trains:
            # drawn in any case, so that the random numbers of later parameters are the same
            grad = torch.randn(copied.shape) / min(elements, SAMPLE_SIZE) ** 0.5
            if p.grad is not None:
                grad = local(p.grad)[rows].cpu().clone()
            copied.grad = grad.to(p.dtype)
        copies.append(copied)
    return copies


def _after_a_step(
    make: Callable[[Any], Any], named_or_not: Sequence[Any], copies: Sequence[Parameter]
) -> Any:
    """Run one step on the copies, and return the optimizer or the function that did the step."""
    pairs = zip(named_or_not, copies, strict=True)
    optimizer = make([(x[0], p) if isinstance(x, tuple) else p for x, p in pairs])
    for group in getattr(optimizer, "param_groups", []):
        if group.get("capturable"):
            group["capturable"] = False  # torch allows it only for parameters on accelerators
    step = getattr(optimizer, "step", optimizer)
    step()
    return optimizer
