"""Stand-alone helpers: one call between `loss.backward()` and `optimizer.step()`."""

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
PLAIN_DTYPES = (torch.float32, torch.float64)
"""Those that a helper divides as they are: others are computed with in a wider one."""


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
    """Clip the norm of every gradient; with dim="global" what torch's own function does.

    Args:
        params: One tensor, or an iterable of them.
        max_norm: The largest norm allowed; may be None when `min_norm` is given.
        ord: Which norm: a number, or "l1", "linf", "std", "mad" and the like.
        dim: What is measured together: None each gradient, an int or several each slice along these
            dims, "global" all at once. Where it is left out it is None, with a warning if there are
            several, which torch's own function measures at once.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.
        min_norm: Scale smaller norms up to this one; zeros stay.
        error_if_nonfinite: Raise when the total norm is NaN or infinite. This waits for the device.

    Returns:
        The norm of all gradients before clipping, a 0-dim tensor on their device.

    Example:
        >>> import torch
        >>> from torchzero_clip import clip_grad_norm_
        >>> model = torch.nn.Linear(10, 1)
        >>> model(torch.randn(64, 10)).square().mean().backward()
        >>> total = clip_grad_norm_(model.parameters(), 1.0, dim="global")
    """
    if max_norm is None and min_norm is None:
        raise ValueError("clip_grad_norm_: give max_norm or min_norm, got None for both")
    if max_norm is not None and min_norm is not None and min_norm > max_norm:
        raise ValueError(
            f"clip_grad_norm_: min_norm must be at most max_norm, got min_norm={min_norm} and "
            f"max_norm={max_norm}"
        )
    if isinstance(dim, EllipsisType):
        params, dim = listed(params), None
        if len(params) > 1 and min_norm is None and not torch.compiler.is_compiling():
            warn(
                f"clip_grad_norm_: each of the {len(params)} gradients is clipped by itself: "
                'dim="global" clips their norm together, as torch does; dim=None says that it is '
                "meant",
            )
    rule = rule_of(_Between, min_norm, max_norm, ord, dim, inverse_dims, min_size)
    return _apply_norm_rule(rule, params, error_if_nonfinite)


@torch.no_grad()
def clip_grad_value_(params: Params, value: float) -> None:
    """Clamp every entry of the gradients to ±value, as torch's own function does.

    Args:
        params: One tensor, or an iterable of them.
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
    """Give every gradient the norm `norm_value`.

    Args:
        params: One tensor, or an iterable of them.
        norm_value: The norm that every unit gets; zeros stay.
        ord: Which norm, as in `clip_grad_norm_`.
        dim: What is measured together, as in `clip_grad_norm_`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone; none by default, a single element becomes
            ±norm_value.

    Returns:
        The norm of all gradients before, a 0-dim tensor on their device.

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
    """Subtract its mean from every gradient; `dim=0, inverse_dims=True` is that of the paper.

    Args:
        params: One tensor, or an iterable of them.
        dim: What has one mean, as in `clip_grad_norm_`.
        inverse_dims: Take all dims except those given.
        min_size: Units of fewer elements are left alone.

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
    """Clamp the entries of every gradient to the percentile of their magnitudes.

    Args:
        params: One tensor, or an iterable of them.
        percentile: Between 0 and 100.
        dim: None for a percentile of each gradient, "global" for one of all entries together.

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

    min_norm: Live[float | None]
    max_norm: Live[float | None]
    ord: Ord = 2
    dim: Scope = None
    inverse_dims: bool = False
    min_size: int = 2

    pure = True

    @property
    def sets_norm(self) -> bool:  # type: ignore[override]
        return self.min_norm is not None

    def check(self) -> None:
        super().check()
        self.require("min_norm", at_least=0, optional=True)
        self.require("max_norm", at_least=0, optional=True)

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        low, high = group["min_norm"], group["max_norm"]
        return high if low is None else norm.clamp(low, high)


_Between.__name__ = "clip_grad_norm_"  # errors name what was called


def rule_of(kind: Callable[..., R], *args: Any) -> R:
    """A rule that rewrites gradients: one for all calls with equal arguments."""
    if torch.compiler.is_compiling():  # which warns of caches
        return kind(*args, target="grad")
    try:
        rule: R = _known(kind, *args)
    except TypeError:  # arguments without a hash, or wrong ones
        return kind(*args, target="grad")
    return rule


@functools.lru_cache(maxsize=64, typed=True)
def _known(kind: Callable[..., Any], *args: Any) -> Any:
    return kind(*args, target="grad")


def _alone(rule: Transform) -> tuple[Link, dict[str, Any]]:
    """The link of a rule that is alone, and its live values."""
    (link,) = bind(Chain(rule))
    return link, GroupKeys([link]).defaults


_known_alone = functools.lru_cache(maxsize=64)(_alone)


def listed(params: Params) -> list[Tensor]:
    """The parameters, of which there may be one; each once, as tied ones may be listed twice."""
    if isinstance(params, torch.nn.Module):
        raise TypeError("a helper takes parameters, got a module: pass model.parameters()")
    return [params] if isinstance(params, Tensor) else list(dict.fromkeys(params))


def buckets_of(
    rule: Transform, params: Params, process_group: Any = None, place: GradPlace = USUAL
) -> list[Bucket]:
    """The gradients as the rule sees them."""
    if getattr(rule, "scope", None) == "layer":
        raise ValueError(
            "dim='layer' needs the names of the parameters, which a helper does not see: use "
            "Clipper(model.named_parameters(), ClipNorm(max_norm, dim='layer')).step()"
        )
    tensors = listed(params)
    refuse_flat(tensors)
    link, defaults = (_alone if torch.compiler.is_compiling() else _known_alone)(rule)
    group = {"params": tensors, "chain": {}, **defaults}
    roster = Roster(reads_tags=False)
    with Step([group], None, {}, AT_ONCE, process_group, roster, place=place) as step:
        buckets = in_buckets(step)
    return [bucket.seen_by(link) for bucket in buckets]


@traced
def apply(rule: Transform, params: Params, place: GradPlace = USUAL) -> bool:
    """Apply a rule that needs no other; returns whether there were gradients."""
    buckets = buckets_of(rule, params, place=place)
    for bucket in buckets:
        refuse_complex(bucket)
    if buckets:
        rule.step(buckets)
    return bool(buckets)


def _apply_or_warn(rule: Transform, params: Params) -> None:
    if not apply(rule, params):
        _warn_of_none()


def _warn_of_none() -> None:
    if not torch.compiler.is_compiling():
        warn(
            "no parameter has a gradient, so nothing is clipped: give parameters, not their "
            "gradients nor an iterator that is used up, between backward() and step()",
        )


@traced
def _apply_norm_rule(rule: NormRule, params: Params, error_if_nonfinite: bool = False) -> Tensor:
    """Apply the rule; returns the norm of everything before."""
    tensors = listed(params)
    refuse_flat(tensors)
    having = [p for p in tensors if p.grad is not None]
    grads = [p.grad for p in having if p.grad is not None]
    joint = rule.scope == "global"
    if (joint or rule.scope is None) and plain(having, grads) and grads[0].dtype in PLAIN_DTYPES:
        units = PlainGradients(grads, norms.measure(rule.ord), joint)
        norm = units.norm()
        total = (norm[0] if joint else units.total()).to(units.dtype)
        _checked(total, error_if_nonfinite)
        units.divide(decide(rule, norm, {}, [_values(rule)], units))
        return total
    buckets = buckets_of(rule, tensors)
    if not buckets:
        _warn_of_none()
        return torch.zeros(())
    every = rule.units(buckets)
    norm = every.norm()
    total = (norm[0] if joint else every.total()).to(every.dtype)
    _checked(total, error_if_nonfinite)
    rule.apply(every, decide(rule, norm, {}, every.live(), every))
    return total


def _checked(total: Tensor, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients is {total.item()}; with "
            "error_if_nonfinite=False they would be clipped all the same"
        )


def _values(rule: NormRule) -> Group:
    """The live values of a rule that is alone."""
    link, defaults = _known_alone(rule)
    return link.values(defaults)


class PlainGradients(Cells):
    """Gradients for which a helper needs no bucket: measured, decided on, and divided in place.

    Args:
        grads: Whole tensors of one dtype on one device.
        order: The norm.
        joint: Whether all are one unit, or each is one.
    """

    def __init__(self, grads: list[Tensor], order: norms.Measure, joint: bool) -> None:
        self.grads, self.order, self.joint, self.degree = grads, order, joint, order.degree
        self.dtype = grads[0].dtype
        self.sizes = list(map(Tensor.numel, grads))
        self.joint_norm = norms.joint_norm(grads, order) if joint else None
        self._stats: Tensor | None = None

    def norm(self) -> Tensor:
        """The norm of every unit."""
        if self.joint_norm is not None:
            return self.joint_norm
        return self._of(1 if self.joint else len(self.grads))

    def total(self) -> Tensor:
        """The norm of all gradients, as one."""
        return self._of(1)[0]

    def too_small(self, size: int) -> Tensor | None:
        sizes = [sum(self.sizes)] if self.joint else self.sizes
        if size <= 1 or min(sizes) >= size:
            return None
        return norms.numbers([float(n < size) for n in sizes], self.grads[0].device) > 0

    def divide(self, decision: Decision) -> None:
        """Bring the gradients to what was decided."""
        (ratio,), u = decision.divisors, TensorList(self.grads, owned=True)
        for name, x in norms.divisions(ratio, self.dtype, number=self.joint):
            if isinstance(x, Tensor):
                x = x.to(self.dtype)[0] if self.joint else x.to(self.dtype)
            u = u.div_(x) if name == "div" else times(u, x) if self.joint else u.mul_(x)

    def _of(self, units: int) -> Tensor:
        if self._stats is None:
            self._stats = norms.statistics(self.grads, self.order)
        table = self._stats.view(len(self._stats), units, -1)
        counts = None
        size = None
        if self.order.counts or self.order.kind == "sum":
            counts = norms.numbers(self.sizes, self._stats).view(units, -1)
            size = counts.sum(dim=1)
        return norms.finish(norms.merge(table, counts, self.order), size, self.order)
