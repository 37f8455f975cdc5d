"""Clip functions with the mistakes that have been found in the wild, and one without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchzero_clip import ClipNorm, Clipper, clip_grad_norm_
from torchzero_clip.core.sharding.layout import local


def right(params: Sequence[Tensor], max_norm: float, case: Any) -> Tensor:
    if case.group is None:
        return clip_grad_norm_(params, max_norm, dim="global")
    rule = ClipNorm(max_norm, dim="global")
    return Clipper(params, rule, process_group=case.group).step()


def grads_of(params: Iterable[Tensor]) -> list[Tensor]:
    return [local(p.grad) for p in dict.fromkeys(params) if p.grad is not None]


def squares(grads: Iterable[Tensor]) -> float:
    return sum([t.double().square().sum().item() for t in grads])


def scale(params: Iterable[Tensor], norm: float, max_norm: float) -> float:
    for t in grads_of(params):
        if norm > max_norm or norm != norm:
            t.mul_(max_norm / norm)
    return norm


def total(value: float) -> float:
    t = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(t)
    return t.item()


def own_part_alone(params: Sequence[Tensor], max_norm: float) -> float:
    """Each rank clips by the norm of its own shards."""
    return scale(params, math.sqrt(squares(grads_of(params))), max_norm)


def copies_count(params: Sequence[Tensor], max_norm: float) -> float:
    """Sums over ranks what several of them have."""
    return scale(params, math.sqrt(total(squares(grads_of(params)))), max_norm)


def added(params: Sequence[Tensor], max_norm: float) -> float:
    """Adds norms where their squares should be."""
    return scale(params, sum([t.double().norm().item() for t in grads_of(params)]), max_norm)


def no_root(params: Sequence[Tensor], max_norm: float) -> float:
    return scale(params, squares(grads_of(params)), max_norm)


def measures_only(params: Sequence[Tensor], max_norm: float) -> float:
    """Returns the norm, and scales nothing."""
    return math.sqrt(squares(grads_of(params)))


def scales_up(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Brings small gradients to the limit, too."""
    params = list(params)
    norm = clip_grad_norm_(params, max_norm, dim="global")
    for t in grads_of(params):
        if 0 < norm < max_norm:
            t.mul_(max_norm / norm)
    return norm


def nearly_one(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Divides by a number near 1 within the limit."""
    params = list(params)
    norm = clip_grad_norm_(params, max_norm, dim="global")
    for t in grads_of(params):
        t.div_(1 + 1e-6)
    return norm


def goes_through_twice(params: Iterable[Tensor], max_norm: float) -> float:
    """Measures, and then finds a generator at its end."""
    return scale(params, math.sqrt(squares(grads_of(params))), max_norm)


def rounds_its_factor(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales by a number with the eight bits of bfloat16."""
    grads = grads_of(params)
    norm = torch.stack([t.double().norm() for t in grads]).norm()
    factor = (max_norm / norm).clamp(max=1).to(torch.bfloat16)
    for t in grads:
        t.mul_(factor)
    return norm


def silent_and_wrong(params: Sequence[Tensor], max_norm: float) -> None:
    """Returns nothing, and counts copies."""
    copies_count(params, max_norm)


def gathers(params: Sequence[Tensor], max_norm: float) -> float:
    """Right, by way of whole gradients on every rank."""
    whole = [p.grad for p in dict.fromkeys(params) if p.grad is not None]
    every = [getattr(t, "full_tensor", lambda t=t: t)() for t in whole]
    return scale(params, math.sqrt(squares(every)), max_norm)


def hides_nan(params: Sequence[Tensor], max_norm: float) -> float:
    for t in grads_of(params):
        t.nan_to_num_(0)
    return own_part_alone(params, max_norm)


def raises_on_one_rank(params: Sequence[Tensor], max_norm: float) -> float:
    if dist.is_initialized() and dist.get_rank() == 1:
        raise ValueError("a mistake on one rank")
    return copies_count(params, max_norm)


@cache
def world() -> Any:
    """The group of all ranks, kept as deepspeed and DTensor keep groups."""
    return dist.group.WORLD


def keeps_its_group(params: Sequence[Tensor], max_norm: float) -> float:
    """Right for shards; whole gradients are refused."""
    grads = grads_of(params)
    sums = torch.tensor(squares(grads), dtype=torch.float64)
    dist.all_reduce(sums, group=world())
    dist.broadcast(sums, src=0, group=world())
    if grads[0] is params[0].grad:
        raise TypeError("no shard")
    return scale(params, math.sqrt(sums.item()), max_norm)


def in_halves(params: Sequence[Tensor], max_norm: float) -> Tensor:
    """Adds squares in the dtype of the gradients."""
    norm = torch.stack([t.square().sum() for t in grads_of(params)]).sum().sqrt()
    scale(params, norm.item(), max_norm)
    return norm


PLANTED: list[Callable[..., Any]] = [
    own_part_alone,
    copies_count,
    gathers,
    silent_and_wrong,
]
