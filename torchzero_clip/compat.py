"""Replacements for torch's functions that clip gradients, with exact norms.

`from torchzero_clip.compat import clip_grad_norm_, clip_grad_value_` replaces the same import from
`torch.nn.utils`. Calls do not change. The module also has the two halves of `clip_grad_norm_`:
`get_total_norm` and `clip_grads_with_norm_`.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import TensorList, Units
from torchzero_clip.core.decision import decide
from torchzero_clip.core.gradients import USUAL, GradPlace, Where
from torchzero_clip.core.sharding.layout import Layout, full, layout_of, summed
from torchzero_clip.core.torch_private import traced
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.grads import Params, apply, buckets_of, listed
from torchzero_clip.modules.clipping import ClipNorm, ClipValue

__all__ = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Params,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: Any = None,
    grad: Where = "grad",
) -> Tensor:
    """Clip the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does.

    The norm is exact. It does not overflow, it does not lose small elements, and it covers all
    shards of sharded parameters. Gradients whose norm is within the limit stay bitwise identical.
    If gradients are sharded, or if `process_group` is given, all ranks must call this function, as
    with torch's function.

    Args:
        parameters: A parameter, or an iterable of parameters.
        max_norm: The largest norm allowed.
        norm_type: The order of the norm: any number, including negative numbers, or "inf". 0 counts
            the nonzero elements, whereas torch counts the nonzero tensors.
        error_if_nonfinite: Whether to raise RuntimeError if the norm is NaN or infinite. As in
            torch, the error is also raised if powers of the elements overflow but the norm does
            not. This check synchronizes with the device.
        foreach: Ignored. torch's function has this argument; here there is one implementation.
        process_group: The processes that have other parameters of the same model, such as the
            stages of a pipeline. The norm then covers the parameters of all these processes.
        grad: The place of gradients that are not in `.grad`: the name of an attribute such as
            "main_grad", or a function, as for `Modular`.

    Returns:
        The norm before clipping, a 0-dim tensor with the device and the dtype of the gradients. If
        this dtype cannot represent the norm, the returned norm is infinite, but the gradients are
        still clipped by the exact norm. For example, float16 represents norms up to 65504. If one
        mesh shards all gradients and there is no `process_group`, the norm is a DTensor, as in
        torch. But every rank has the whole norm.

    Example:
        >>> import torch
        >>> from torchzero_clip import compat
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> total = compat.clip_grad_norm_(model.parameters(), 1.0)
    """
    params = listed(parameters)
    order = float(norm_type)
    if not params and isinstance(parameters, types.GeneratorType):
        warn("`parameters` is an empty generator, no gradient clipping will occur.")
    place = GradPlace(grad)
    grads = [g for g in map(place.of, params) if g is not None]
    if not grads and process_group is not None:
        grads = [_empty_parameter(params)]  # the other processes wait for the norm of this one
        params = grads
        place = USUAL
    if not grads:
        return torch.tensor(0.0)
    rule = ClipNorm(float(max_norm), ord=abs(order), dim="global", target="grad")
    total = _clip(rule, params, grads, order, error_if_nonfinite, process_group, place)
    return total if process_group is not None else _on_mesh(total, grads)


@torch.no_grad()
def clip_grad_value_(
    parameters: Params, clip_value: float, foreach: bool | None = None, *, grad: Where = "grad"
) -> None:
    """Clamp every element of the gradients, as `torch.nn.utils.clip_grad_value_` does.

    Args:
        parameters: A parameter, or an iterable of parameters.
        clip_value: The largest magnitude allowed.
        foreach: Ignored. torch's function has this argument; here there is one implementation.
        grad: The place of gradients that are not in `.grad`: the name of an attribute such as
            "main_grad", or a function, as for `Modular`.

    Example:
        >>> import torch
        >>> from torchzero_clip import compat
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> compat.clip_grad_value_(model.parameters(), 0.5)
    """
    apply(ClipValue(float(clip_value), target="grad"), parameters, GradPlace(grad))


@torch.no_grad()
def get_total_norm(
    tensors: Params,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the exact norm of all tensors together, as `torch.nn.utils.get_total_norm` does.

    If tensors are sharded, all ranks must call this function, as with torch's function.

    Args:
        tensors: A tensor, or an iterable of tensors. Pass gradients, not parameters.
        norm_type: The order of the norm, as in `clip_grad_norm_`.
        error_if_nonfinite: Whether to raise RuntimeError if the norm is NaN or infinite, as in
            `clip_grad_norm_`.
        foreach: Ignored. torch's function has this argument; here there is one implementation.

    Returns:
        The norm, in the form in which `clip_grad_norm_` returns it.

    Example:
        >>> import torch
        >>> from torchzero_clip import compat
        >>> print(compat.get_total_norm([torch.tensor(3.0), torch.tensor(4.0)]).item())
        5.0
    """
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not grads:
        return torch.tensor(0.0)
    order = float(norm_type)
    rule = ClipNorm(1.0, ord=abs(order), dim="global", target="grad")
    holders = [_holder(g) for g in grads]
    return _on_mesh(_measured(rule, holders, grads, order, error_if_nonfinite)[-1], grads)


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Params,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
    *,
    grad: Where = "grad",
) -> None:
    """Clip gradients by a given norm, as `torch.nn.utils.clip_grads_with_norm_` does.

    Args:
        parameters: A parameter, or an iterable of parameters.
        max_norm: The largest norm allowed.
        total_norm: The norm that `get_total_norm` returned. If this norm is within the limit, the
            gradients stay bitwise identical. If this norm is infinite, finite gradients become
            zeros, as in torch.
        foreach: Ignored. torch's function has this argument; here there is one implementation.
        grad: The place of gradients that are not in `.grad`: the name of an attribute such as
            "main_grad", or a function, as for `Modular`.

    Example:
        >>> import torch
        >>> from torchzero_clip import compat
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> total = compat.get_total_norm([p.grad for p in model.parameters()])
        >>> compat.clip_grads_with_norm_(model.parameters(), 1.0, total)
    """
    rule = ClipNorm(float(max_norm), dim="global", target="grad")
    if buckets := buckets_of(rule, parameters, place=GradPlace(grad)):
        units = rule.units(buckets)
        norm = full(torch.as_tensor(total_norm)).to(units.home, units.dtype).reshape(1)
        rule.apply(units, decide(rule, norm, {}, units.live(), units))


@traced
def _clip(
    rule: ClipNorm,
    params: list[Tensor],
    grads: list[Tensor],
    order: float,
    error_if_nonfinite: bool,
    process_group: Any,
    place: GradPlace,
) -> Tensor:
    """Clip the gradients by a rule, and return their norm before clipping."""
    units, norm, total = _measured(
        rule, params, grads, order, error_if_nonfinite, process_group, place
    )
    rule.apply(units, decide(rule, norm, {}, units.live(), units))
    return total


@traced
def _measured(
    rule: ClipNorm,
    params: list[Tensor],
    grads: list[Tensor],
    order: float,
    error_if_nonfinite: bool,
    process_group: Any = None,
    place: GradPlace = USUAL,
) -> tuple[Units, Tensor, Tensor]:
    """Measure the gradients.

    Returns:
        The gradients as units, the norm of each unit, and the norm in the form that torch returns.
    """
    units = rule.units(buckets_of(rule, params, process_group, place))
    norm = units.norm() if order >= 0 else _negative(units)
    total = norm[0].to(grads[0].device, _dtype_of(grads))
    if error_if_nonfinite and not _finite(total, order):
        raise RuntimeError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite "
            "norm anyway, set `error_if_nonfinite=False`"
        )
    return units, norm, total


def _on_mesh(total: Tensor, grads: list[Tensor]) -> Tensor:
    """Return the norm in torch's form. It is a DTensor if one mesh shards all gradients."""
    layouts = {layout_of(g) for g in grads}
    meshes = [layout.mesh for layout in layouts if layout is not None]
    if len(meshes) < len(layouts) or any(mesh != meshes[0] for mesh in meshes):
        return total
    from torch.distributed.tensor import Replicate

    return Layout(meshes[0], (Replicate(),) * meshes[0].ndim, ()).wrap(total)


def _holder(grad: Tensor) -> Tensor:
    """Return a parameter with a given gradient. The parameter shares the gradient's memory.

    A Partial gradient, which tensor parallelism produces, is first summed over the ranks.
    """
    holder = summed(grad.detach())
    holder.grad = holder.detach()
    return holder


def _empty_parameter(params: list[Tensor]) -> Tensor:
    """Return a parameter without elements. The norm of its gradient is 0."""
    empty = params[0].new_empty(0) if params else torch.empty(0)
    empty.grad = torch.empty_like(empty)
    return empty


def _dtype_of(grads: list[Tensor]) -> torch.dtype:
    """Return the dtype of the norm, for gradients that may have several dtypes."""
    return functools.reduce(torch.promote_types, [g.dtype for g in grads]).to_real()


def _negative(units: Units) -> Tensor:
    """Return ‖x‖₋ₚ = 1 / ‖1/x‖ₚ, where p is the order of the units' norm."""
    inverses = [
        g.to(torch.promote_types(g.dtype, torch.float64)).reciprocal()
        for bucket in units.buckets
        for g in bucket.u
    ]
    return units.measure(TensorList(inverses)).reciprocal()


def _finite(total: Tensor, order: float) -> bool:
    """Return whether torch's norm is finite: Σ|x|ᵖ must not overflow, or vanish if p < 0."""
    if not math.isfinite(order) or order == 0:
        return bool(total.isfinite())
    power = total.to(torch.promote_types(total.dtype, torch.float32)) ** order
    return bool(total.isfinite() & (power.isfinite() if order > 0 else power != 0))
