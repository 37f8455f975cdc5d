"""Functions that change gradients in place, between `loss.backward()` and `optimizer.step()`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchzero_clip.core import (
    Bucket,
    Chain,
    Group,
    Live,
    NormRule,
    Ord,
    Scope,
    Step,
    TensorList,
    Transform,
    UnitState,
    bind,
    in_buckets,
    norms,
)
from torchzero_clip.core.bounds import NonNegative, Threshold
from torchzero_clip.core.chain import refuse_complex
from torchzero_clip.core.cohort import Roster
from torchzero_clip.core.decision import Cells, Decision, decide
from torchzero_clip.core.gradients import USUAL, GradPlace, plain
from torchzero_clip.core.link import Link
from torchzero_clip.core.sharding.layout import refuse_flat
from torchzero_clip.core.torch_private import traced
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.engines import AT_ONCE
from torchzero_clip.engines.tail import times
from torchzero_clip.modules.clipping import Centralize, ClipPercentile, ClipValue, Normalize
from torchzero_clip.optimizer.keys import GroupKeys

Params: TypeAlias = "Tensor | Iterable[Tensor]"
R = TypeVar("R", bound=Transform)
RULES_KEPT = 64
"""The number of rules that stay in memory for later calls."""
PLAIN_DTYPES = (torch.float32, torch.float64)
"""The dtypes in which gradients are divided. Other dtypes are first converted to a wider one."""


@torch.no_grad()
def clip_grad_norm_(
    params: Params,
    max_norm: float | None,
    ord: Ord = 2,
    dim: Scope | EllipsisType = ...,
    inverse_dims: bool = False,
    min_size: int = 2,
    min_norm: float | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the norm of each gradient in place. With dim="global", clip the norm of all gradients.

    With dim="global", the function clips the same norm as torch's own function.

    Args:
        params: A parameter, or an iterable of parameters.
        max_norm: The largest norm allowed. It may be None if `min_norm` is given.
        ord: The kind of norm: a number, or a name such as "l1", "linf", "std" or "mad".
        dim: The unit whose norm is clipped: None for each gradient, an int or several ints for
            each slice along these dims, "global" for all gradients together. The default is None.
            If there are several gradients and you do not pass `dim`, the function warns, because
            torch's own function clips all gradients together.
        inverse_dims: Whether to use all dims except `dim`.
        min_size: The smallest unit that is clipped. Units with fewer elements are not changed.
        min_norm: The smallest norm allowed. Smaller norms are scaled up to `min_norm`, except norms
            of zero.
        error_if_nonfinite: Whether to raise RuntimeError if the total norm is NaN or infinite. This
            synchronizes with the device.

    Returns:
        The norm of all gradients together before clipping, a 0-dim tensor on their device.

    Example:
        >>> import torch
        >>> from torchzero_clip import clip_grad_norm_
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> total = clip_grad_norm_(model.parameters(), 1.0, dim="global")
    """
    if max_norm is None and min_norm is None:
        raise ValueError("clip_grad_norm_: pass max_norm or min_norm, got None for both")
    if max_norm is not None and min_norm is not None and min_norm > max_norm:
        raise ValueError(
            f"clip_grad_norm_: min_norm must be at most max_norm, got min_norm={min_norm} and "
            f"max_norm={max_norm}"
        )
    if isinstance(dim, EllipsisType):
        params = listed(params)
        dim = None
        if len(params) > 1 and min_norm is None and not torch.compiler.is_compiling():
            warn(
                f"clip_grad_norm_: each of the {len(params)} gradients is clipped by its own "
                "norm. To clip the global norm, as torch.nn.utils.clip_grad_norm_ does, pass "
                'dim="global". To keep one norm per gradient without this warning, pass dim=None',
            )
    rule = rule_of(_Between, min_norm, max_norm, ord, dim, inverse_dims, min_size)
    return _apply_norm_rule(rule, params, error_if_nonfinite)


@torch.no_grad()
def clip_grad_value_(params: Params, value: float) -> None:
    """Clamp every element of the gradients to ±value in place, as torch's own function does.

    Args:
        params: A parameter, or an iterable of parameters.
        value: The largest magnitude allowed.

    Example:
        >>> import torch
        >>> from torchzero_clip import clip_grad_value_
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> clip_grad_value_(model.parameters(), 0.5)
    """
    _apply_or_warn(rule_of(ClipValue, value), params)


@torch.no_grad()
def normalize_grads_(
    params: Params,
    norm_value: float,
    ord: Ord = 2,
    dim: Scope = None,
    inverse_dims: bool = False,
    min_size: int = 1,
) -> Tensor:
    """Scale every gradient in place to the norm `norm_value`.

    Args:
        params: A parameter, or an iterable of parameters.
        norm_value: The norm that every unit gets, except units of zeros, which are not changed.
        ord: The kind of norm, as in `clip_grad_norm_`.
        dim: The unit that is scaled, as in `clip_grad_norm_`.
        inverse_dims: Whether to use all dims except `dim`.
        min_size: The smallest unit that is scaled. By default every unit is scaled, so a single
            element becomes ±norm_value.

    Returns:
        The norm of all gradients together before scaling, a 0-dim tensor on their device.

    Example:
        >>> import torch
        >>> from torchzero_clip import normalize_grads_
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> total = normalize_grads_(model.parameters(), 1.0, dim="global")
    """
    rule = rule_of(Normalize, norm_value, ord, dim, inverse_dims, min_size)
    return _apply_norm_rule(rule, params)


@torch.no_grad()
def centralize_grads_(
    params: Params, dim: Scope = None, inverse_dims: bool = False, min_size: int = 2
) -> None:
    """Subtract from every gradient its mean, in place.

    With dim=0 and inverse_dims=True, the function does the same as the paper on gradient
    centralization.

    Args:
        params: A parameter, or an iterable of parameters.
        dim: The unit that has one mean, as in `clip_grad_norm_`.
        inverse_dims: Whether to use all dims except `dim`.
        min_size: The smallest unit that is centralized. Units with fewer elements are not changed.

    Example:
        >>> import torch
        >>> from torchzero_clip import centralize_grads_
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> centralize_grads_(model.parameters(), dim=0, inverse_dims=True)
    """
    _apply_or_warn(rule_of(Centralize, dim, inverse_dims, min_size), params)


@torch.no_grad()
def clip_grad_percentile_(
    params: Params, percentile: float, dim: Literal["global"] | None = None
) -> None:
    """Clamp the elements of every gradient in place to a percentile of their magnitudes.

    Args:
        params: A parameter, or an iterable of parameters.
        percentile: A number between 0 and 100.
        dim: None for a separate percentile of each gradient, "global" for one percentile of all
            elements.

    Example:
        >>> import torch
        >>> from torchzero_clip import clip_grad_percentile_
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> clip_grad_percentile_(model.parameters(), 99.0)
    """
    _apply_or_warn(rule_of(ClipPercentile, percentile, dim), params)


class _Between(NormRule):
    """u ← u · min(max(‖u‖, min_norm), max_norm) / ‖u‖"""

    min_norm: Live[NonNegative | None]
    max_norm: Live[Threshold | None]
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 2

    pure = True

    @property
    def sets_norm(self) -> bool:  # type: ignore[override]
        return self.min_norm is not None

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        low = group["min_norm"]
        high = group["max_norm"]
        return high if low is None else norm.clamp(low, high)


_Between.__name__ = "clip_grad_norm_"  # error messages name the function that the user called


def rule_of(kind: Callable[..., R], *args: Any) -> R:
    """Return a rule that writes gradients in place. Calls with equal arguments share one rule."""
    if torch.compiler.is_compiling():  # torch.compile warns about cached functions
        return kind(*args, target="grad")
    try:
        rule: R = _cached_rule(kind, *args)
    except TypeError:  # the arguments have no hash, or the rule does not accept them
        return kind(*args, target="grad")
    return rule


@functools.lru_cache(maxsize=RULES_KEPT, typed=True)
def _cached_rule(kind: Callable[..., Any], *args: Any) -> Any:
    """Return the rule for these arguments, and keep the rule for later calls."""
    return kind(*args, target="grad")


def _bound(rule: Transform) -> tuple[Link, dict[str, Any]]:
    """Return the link of a chain that has only this rule, and the hyperparameters of the rule."""
    (link,) = bind(Chain(rule))
    return link, GroupKeys([link]).defaults


_cached_bound = functools.lru_cache(maxsize=RULES_KEPT)(_bound)


def listed(params: Params) -> list[Tensor]:
    """Return a list with each parameter once, because tied parameters may be listed twice."""
    if isinstance(params, torch.nn.Module):
        raise TypeError("params must be parameters, got a module: pass model.parameters()")
    return [params] if isinstance(params, Tensor) else list(dict.fromkeys(params))


def buckets_of(
    rule: Transform, params: Params, process_group: Any = None, place: GradPlace = USUAL
) -> list[Bucket]:
    """Return the gradients in buckets, the form in which a rule receives gradients."""
    if getattr(rule, "scope", None) == "layer":
        raise ValueError(
            "dim='layer' needs the names of the parameters, but this function does not receive "
            "names: use Clipper(model.named_parameters(), ClipNorm(max_norm, dim='layer')).step()"
        )
    tensors = listed(params)
    refuse_flat(tensors)
    link, defaults = _bound(rule) if torch.compiler.is_compiling() else _cached_bound(rule)
    group = {"params": tensors, "chain": {}, **defaults}
    roster = Roster(reads_tags=False)
    with Step([group], None, {}, AT_ONCE, process_group, roster, place=place) as step:
        buckets = in_buckets(step)
    return [bucket.seen_by(link) for bucket in buckets]


@traced
def apply(rule: Transform, params: Params, place: GradPlace = USUAL) -> bool:
    """Apply a rule to the gradients, and return whether any parameter has a gradient."""
    buckets = buckets_of(rule, params, place=place)
    for bucket in buckets:
        refuse_complex(bucket)
    if buckets:
        rule.step(buckets)
    return bool(buckets)


def _apply_or_warn(rule: Transform, params: Params) -> None:
    """Apply a rule to the gradients, and warn if no parameter has a gradient."""
    if not apply(rule, params):
        _warn_of_none()


def _warn_of_none() -> None:
    """Warn that no parameter has a gradient."""
    if not torch.compiler.is_compiling():
        warn(
            "no parameter has a gradient, so nothing was clipped: call this function after "
            "backward() and before step(). Pass parameters, not gradients, and do not pass "
            "an exhausted iterator",
        )


@traced
def _apply_norm_rule(rule: NormRule, params: Params, error_if_nonfinite: bool = False) -> Tensor:
    """Apply a norm rule to the gradients, and return the norm of all gradients before the rule."""
    tensors = listed(params)
    refuse_flat(tensors)
    with_grad = [p for p in tensors if p.grad is not None]
    grads = [p.grad for p in with_grad if p.grad is not None]
    joint = rule.scope == "global"
    supported = joint or rule.scope is None
    if supported and plain(with_grad, grads) and grads[0].dtype in PLAIN_DTYPES:
        units = PlainGradients(grads, norms.measure(rule.ord), joint)
        norm = units.norm()
        total = (norm[0] if joint else units.total()).to(units.dtype)
        _check_finite(total, error_if_nonfinite)
        units.divide(decide(rule, norm, {}, [_values(rule)], units))
        return total
    buckets = buckets_of(rule, tensors)
    if not buckets:
        _warn_of_none()
        return torch.zeros(())
    bucket_units = rule.units(buckets)
    norm = bucket_units.norm()
    total = (norm[0] if joint else bucket_units.total()).to(bucket_units.dtype)
    _check_finite(total, error_if_nonfinite)
    rule.apply(bucket_units, decide(rule, norm, {}, bucket_units.live(), bucket_units))
    return total


def _check_finite(total: Tensor, error_if_nonfinite: bool) -> None:
    """Raise RuntimeError if the norm is not finite and `error_if_nonfinite` is true."""
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {total.item()}. To clip anyway, pass "
            "error_if_nonfinite=False"
        )


def _values(rule: NormRule) -> Group:
    """Return the hyperparameters of a rule that is the only link of its chain."""
    link, defaults = _cached_bound(rule)
    return link.values(defaults)


class PlainGradients(Cells):
    """Gradients that a helper measures and divides in place, without buckets.

    Args:
        grads: Whole tensors of one dtype on one device.
        order: The norm.
        joint: Whether all gradients together are one unit, or each gradient is a unit.
    """

    def __init__(self, grads: list[Tensor], order: norms.Measure, joint: bool) -> None:
        self.grads = grads
        self.order = order
        self.joint = joint
        self.degree = order.degree
        self.dtype = grads[0].dtype
        self.sizes = list(map(Tensor.numel, grads))
        self.joint_norm = norms.joint_norm(grads, order) if joint else None
        self._stats: Tensor | None = None

    def norm(self) -> Tensor:
        """Return the norm of every unit."""
        if self.joint_norm is not None:
            return self.joint_norm
        return self._norms(1 if self.joint else len(self.grads))

    def total(self) -> Tensor:
        """Return the norm of all gradients together."""
        return self._norms(1)[0]

    def too_small(self, size: int) -> Tensor | None:
        """Return which units have fewer elements than `size`, or None if no unit is so small."""
        sizes = [sum(self.sizes)] if self.joint else self.sizes
        if size <= 1 or min(sizes) >= size:
            return None
        return norms.numbers([float(n < size) for n in sizes], self.grads[0].device) > 0

    def divide(self, decision: Decision) -> None:
        """Divide the gradients in place by the divisors of a decision."""
        (ratio,) = decision.divisors
        u = TensorList(self.grads, owned=True)
        for name, x in norms.divisions(ratio, self.dtype, number=self.joint):
            if isinstance(x, Tensor):
                x = x.to(self.dtype)[0] if self.joint else x.to(self.dtype)
            if name == "div":
                u = u.div_(x)
            elif self.joint:
                u = times(u, x)
            else:
                u = u.mul_(x)

    def _norms(self, units: int) -> Tensor:
        """Return the norm of all gradients if they are one unit, otherwise of each gradient."""
        if self._stats is None:
            self._stats = norms.statistics(self.grads, self.order)
        table = self._stats.view(len(self._stats), units, -1)
        counts = None
        size = None
        if self.order.counts or self.order.kind == "sum":
            counts = norms.numbers(self.sizes, self._stats).view(units, -1)
            size = counts.sum(dim=1)
        return norms.finish(norms.merge(table, counts, self.order), size, self.order)
