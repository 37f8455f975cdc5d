"""Collectives: the ways in which ranks talk in a step, each a verb that starts and waits.

Torch's own start in one operator and wait in another, or in none. Where a step is written down, a
verb is one node, which is done again whether or not this rank needs what comes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from torchzero_clip.core.torch_private import group_named

F = TypeVar("F", bound=Callable[..., Any])


def verb(form: Callable[..., Tensor]) -> Callable[[F], F]:
    """A function of a tensor and a process group, which a TorchFunctionMode sees as a whole.

    `form` takes what it takes, and makes a tensor like the one that comes, without other ranks.
    """

    def as_verb(f: F) -> F:
        @functools.wraps(f)
        def seen(x: Tensor, group: Any, *args: Any) -> Any:
            if torch.compiler.is_compiling() or not has_torch_function_unary(x):
                return f(x, _found(group), *args)
            return handle_torch_function(seen, (x,), x, group, *args)

        seen.form = form  # type: ignore[attr-defined]
        return cast(F, seen)

    return as_verb


def form_of(function: Any) -> Callable[..., Tensor] | None:
    """The form of what a verb makes; None of any other function."""
    return getattr(function, "form", None)


def _found(group: Any) -> Any:
    """A process group, which may be given by its name; None is that of all ranks."""
    return group_named(group) if isinstance(group, str) else group


def _stacked(x: Tensor, group: Any) -> Tensor:
    return x.new_empty(torch.distributed.get_world_size(_found(group)), *x.shape)


@verb(_stacked)
def gather(x: Tensor, group: Any) -> Tensor:
    """The tensors of one shape that the ranks of a group hold, stacked."""
    distributed: Any = torch.distributed
    collect = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    out = _stacked(x, group)
    collect(out.view(-1), x.reshape(-1), group=group)
    return out


@verb(lambda x, group, come, sent: x.new_empty(sum(come)))
def exchange(x: Tensor, group: Any, come: Sequence[int], sent: Sequence[int]) -> Tensor:
    """The pieces of these sizes that come from each rank for pieces of a vector that are sent."""
    out = x.new_empty(sum(come))
    torch.distributed.all_to_all_single(out, x, list(come), list(sent), group=group)
    return out


@verb(lambda x, group: x)
def sum_(x: Tensor, group: Any) -> Tensor:
    """The tensor, with the sum over the ranks of a group in its memory."""
    torch.distributed.all_reduce(x, group=group)
    return x
