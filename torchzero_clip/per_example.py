"""The clipping of per-example gradients. Each gradient is clipped before the average."""

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
    """The result of `per_example_clip`.

    Attributes:
        grads: The mean of the clipped gradients, by the names of the parameters.
        clipped: The fraction of the examples that were clipped, as a 0-dim tensor. If the rule
            measures tensors, layers or slices, it is the fraction of these units.
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
    """Clip the gradient of each example separately, and return the mean over the batch.

    Args:
        loss_fn: A function. loss_fn(params, *example) returns the loss of one example, as a 0-dim
            tensor.
        params: The parameters by name.
        batch: A tensor, or several tensors. Index i along their first dim is example i.
        rule: A norm rule without state, such as `ClipNorm`. With dim="global" or "group" it
            measures the whole gradient of an example. With "layer" or None it measures each layer
            or each tensor of an example's gradient.
        chunk: The number of examples that are processed together. Their gradients need `chunk`
            times the memory of the parameters. None means the whole batch.

    Returns:
        A `PerExample` with the gradients, the fraction of clipped examples, and the loss.

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
        >>> result = per_example_clip(loss_fn, params, (x, y), clip, chunk=16)
        >>> for name, p in params.items():
        ...     p.grad = result.grads[name]
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            "per_example_clip: params must be a dict from names to parameters, such as "
            f"dict(model.named_parameters()), got {params!r}"
        )
    inputs = tuple(batch) if is_row(batch) else (batch,)
    together = getattr(rule, "scope", None) in ("global", "group")
    rule = _by_layer(rule)
    size = _number_of_examples(inputs)
    values = {name: p.detach() for name, p in params.items()}
    of_one = torch.func.grad_and_value(loss_fn)
    of_many = torch.func.vmap(of_one, (None, *[0] * len(inputs)), randomness="different")
    sums = {name: torch.zeros_like(p) for name, p in values.items()}
    clipped: list[Tensor] = []
    losses: list[Tensor] = []
    for start in range(0, size, chunk or size):
        part = [x[start : start + (chunk or size)] for x in inputs]
        grads, part_losses = of_many(values, *part)
        clipped.append(_clip(rule, values, grads, together))
        losses.append(part_losses)
        for name, total in sums.items():
            total += grads[name].sum(0)
    means = {name: total / size for name, total in sums.items()}
    return PerExample(means, torch.cat(clipped).float().mean(), torch.cat(losses).mean())


def _clip(
    rule: NormRule, params: Mapping[str, Tensor], grads: Mapping[str, Tensor], together: bool
) -> Tensor:
    """Clip the gradients of some examples in place, and return a flag for each unit."""
    tensors: list[Tensor] = []
    names: list[str] = []
    for name, p in params.items():
        for i, grad in enumerate(grads[name].unbind()):
            tensor = p.detach()  # shares the values of the parameter, and has its own gradient
            tensor.grad = grad
            tensors.append(tensor)
            # the layer of a parameter is its name up to the last dot
            names.append(f"{i}." if together else f"{i}/{name}")
    (link,) = bind(Chain(rule))
    group = {"params": tensors, "param_names": names, "chain": {}, **GroupKeys([link]).defaults}
    with Step([group], None, {}, AT_ONCE) as step:
        rule.step([bucket.seen_by(link) for bucket in in_buckets(step)])
    clipped: Tensor = metrics_of(step.record)[f"{link.path}/clipped"]
    return clipped.reshape(-1)


def _by_layer(rule: Any) -> NormRule:
    """Return the rule for gradients in which each whole example has the name of one layer.

    A rule that measures all parameters together has to measure each example, so it measures layers.
    """
    if not isinstance(rule, NormRule) or rule.init_unit() or type(rule).init is not Transform.init:
        raise TypeError(
            "per_example_clip: rule= must be a transform that clips norms and keeps no "
            f'state, such as ClipNorm(1.0, dim="global"), got {rule!r}'
        )
    dim = {"dim": "layer"} if rule.scope in ("global", "group") else {}
    changed: NormRule = rule.with_values({"target": "grad", **dim})
    return changed


def _number_of_examples(inputs: tuple[Any, ...]) -> int:
    """Return how many examples a batch has."""
    sizes = {len(x) if isinstance(x, Tensor) and x.dim() else 0 for x in inputs}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in inputs]
        raise ValueError(
            "per_example_clip: all tensors of batch= must have the same size in the first "
            f"dim, the number of examples, got the shapes {shapes}"
        )
    return sizes.pop()
