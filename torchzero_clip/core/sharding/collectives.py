"""Collectives: the ways in which ranks communicate during a step.

Some collectives of torch consist of two operators: one starts the communication, and the other
waits. A collective in this module is a single function that also waits. The graph of a recorded
step contains this function as one node. A replayed step calls the function even if this rank does
not need the result.
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


def collective(form: Callable[..., Tensor]) -> Callable[[F], F]:
    """Turn a function of a tensor and a process group into a collective.

    A TorchFunctionMode receives one call for the whole function. `form` has the same arguments. It
    returns a tensor like the result, but does not communicate.
    """

    def decorate(f: F) -> F:
        @functools.wraps(f)
        def seen(x: Tensor, group: Any, *args: Any) -> Any:
            if torch.compiler.is_compiling() or not has_torch_function_unary(x):
                return f(x, _found(group), *args)
            return handle_torch_function(seen, (x,), x, group, *args)

        seen.form = form  # type: ignore[attr-defined]
        return cast(F, seen)

    return decorate


def form_of(function: Any) -> Callable[..., Tensor] | None:
    """Return the `form` of a collective, or None for any other function."""
    return getattr(function, "form", None)


def _found(group: Any) -> Any:
    """Return the process group for a group or the name of a group. None means all ranks."""
    return group_named(group) if isinstance(group, str) else group


def _stacked(x: Tensor, group: Any) -> Tensor:
    return x.new_empty(torch.distributed.get_world_size(_found(group)), *x.shape)


@collective(_stacked)
def gather(x: Tensor, group: Any) -> Tensor:
    """Return the tensors of all ranks of a group as one stack. All must have the same shape."""
    distributed: Any = torch.distributed
    collect = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    stack = _stacked(x, group)
    collect(stack.view(-1), x.reshape(-1), group=group)
    return stack


@collective(lambda x, group, received, sent: x.new_empty(sum(received)))
def exchange(x: Tensor, group: Any, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    """Send a piece of a vector to each rank, and return the pieces from all ranks as one vector.

    `received` and `sent` are the sizes of the pieces, one for each rank.
    """
    result = x.new_empty(sum(received))
    torch.distributed.all_to_all_single(result, x, list(received), list(sent), group=group)
    return result


@collective(lambda x, group: x)
def sum_(x: Tensor, group: Any) -> Tensor:
    """Sum a tensor over the ranks of a group, in place."""
    torch.distributed.all_reduce(x, group=group)
    return x
