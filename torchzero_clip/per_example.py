"""The gradient of each example, clipped before they are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import Chain, NormRule, Step, Transform, bind, in_buckets
from torchzero_clip.core.argument_values import is_row
from torchzero_clip.engines import AT_ONCE
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.optimizer.metrics import metrics_of


class PerExample(NamedTuple):
    """What `per_example_clip` returns.

    Attributes:
        grads: The mean of the clipped gradients, by the names of the parameters.
        clipped: The share of the examples that were clipped, or of their tensors, layers or slices
            where the rule measures those: a 0-dim tensor.
        loss: The mean of the losses.
    """

    grads: dict[str, Tensor]
    clipped: Tensor
    loss: Tensor


@torch.no_grad()
def per_example_clip(
    loss_fn: Callable[..., Tensor],
    params: Mapping[str, Tensor],
    batch: Any,
    rule: NormRule,
    chunk: int | None = None,
) -> PerExample:
    """The mean over a batch of the gradients of its examples, each clipped by itself.

    Args:
        loss_fn: loss_fn(params, *example) gives the loss of one example, as a 0-dim tensor.
        params: The parameters by name.
        batch: A tensor, or several: entry i along their first dim is example i.
        rule: A rule about norms without memory. With dim="global" or "group" it measures all of an
            example's gradient, with "layer" or None a layer or a tensor of it.
        chunk: How many examples are looked at together; their gradients need that many times the
            memory of the parameters. None for all.

    Example:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, per_example_clip
        >>> model = torch.nn.Linear(10, 1)
        >>> x, y = torch.randn(64, 10), torch.randn(64, 1)
        >>> params = dict(model.named_parameters())
        >>> def loss_fn(params, x, y):
        ...     return (torch.func.functional_call(model, params, (x,)) - y).square().mean()
        ...
        >>> clip = ClipNorm(1.0, dim="global")
        >>> out = per_example_clip(loss_fn, params, (x, y), clip, chunk=16)
        >>> for name, p in params.items():
        ...     p.grad = out.grads[name]
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            "per_example_clip: params must be a dict of name and parameter, as "
            f"dict(model.named_parameters()) is, got {params!r}"
        )
    args = tuple(batch) if is_row(batch) else (batch,)
    rule, together = _measured(rule), getattr(rule, "scope", None) in ("global", "group")
    size = _examples(args)
    held = {name: p.detach() for name, p in params.items()}
    one = torch.func.grad_and_value(loss_fn)
    every = torch.func.vmap(one, (None, *[0] * len(args)), randomness="different")
    sums, clipped, loss = {n: torch.zeros_like(p) for n, p in held.items()}, [], []
    for start in range(0, size, chunk or size):
        part = [arg[start : start + (chunk or size)] for arg in args]
        grads, losses = every(held, *part)
        clipped.append(_clip(rule, held, grads, together))
        loss.append(losses)
        for name, total in sums.items():
            total += grads[name].sum(0)
    share = torch.cat(clipped).float().mean()
    return PerExample({n: t / size for n, t in sums.items()}, share, torch.cat(loss).mean())


def _clip(
    rule: NormRule, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], together: bool
) -> Tensor:
    """Clip the gradients of some examples in place; returns a flag for each unit."""
    tensors, names = [], []
    for name, p in params.items():
        for i, grad in enumerate(grads[name].unbind()):
            tensors.append(p.detach())  # the same values, with a gradient of its own
            tensors[-1].grad = grad
            # a layer is all of a name before its last dot
            names.append(f"{i}." if together else f"{i}/{name}")
    (link,) = bind(Chain(rule))
    group = {"params": tensors, "param_names": names, "chain": {}, **GroupKeys([link]).defaults}
    with Step([group], None, {}, AT_ONCE) as step:
        rule.step([bucket.seen_by(link) for bucket in in_buckets(step)])
    clipped: Tensor = metrics_of(step.record)[f"{link.path}/clipped"]
    return clipped.reshape(-1)


def _measured(rule: Any) -> NormRule:
    """The rule; one of layers where it is one of all, of which each example has its own."""
    memory = not isinstance(rule, NormRule) or rule.init_unit()
    if memory or type(rule).init is not Transform.init:
        raise TypeError(
            "per_example_clip: rule must be a rule about norms without memory, like "
            f'ClipNorm(1.0, dim="global"), got {rule!r}'
        )
    dim = {"dim": "layer"} if rule.scope in ("global", "group") else {}
    out: NormRule = rule.with_values({"target": "grad", **dim})
    return out


def _examples(args: tuple[Any, ...]) -> int:
    """How many examples a batch has."""
    sizes = {len(arg) if isinstance(arg, Tensor) and arg.dim() else 0 for arg in args}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [tuple(arg.shape) if isinstance(arg, Tensor) else type(arg) for arg in args]
        raise ValueError(
            "per_example_clip: batch must be tensors with as many entries along their first dim, "
            f"one for each example, got {shapes}"
        )
    return sizes.pop()
