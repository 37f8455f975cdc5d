"""NormRule: a rule about norms, written once for every scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.decision import Decision, UnitState, decide, divisor
from torchzero_clip.core.engine import Group
from torchzero_clip.core.norms import Ord
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.transform import Reach, Transform
from torchzero_clip.core.units import Units

Scope: TypeAlias = 'int | Sequence[int] | Literal["layer", "group", "global"] | None'
"""The unit of a norm: each tensor (None), slices along dims, a layer, a group, or all."""


class NormRule(Transform):
    """Scale every unit (a tensor, its slices, a layer, a group, the model) by min(1, limit / norm).

    Write `limit`, and for a rule with memory `init_unit` and `observe`. All three see vectors, one
    entry a unit, so a rule never loops. Declare `ord`, `dim`, `inverse_dims` or `min_size` as
    fields to make them arguments. What `init` makes, tensors like the parameters, is seen only by a
    `step` of your own.
    """

    ord = cast(Ord, 2)
    dim = cast(Scope, None)
    inverse_dims = False
    min_size = 1
    open_fields: ClassVar[tuple[str, ...]] = ("ord", "dim", "inverse_dims", "min_size")

    sets_norm: ClassVar[bool] = False
    """Set where the rule scales by limit / norm, up as well as down."""

    clips: ClassVar[bool] = True
    """Whether a group's `clip=False` and `norm_group` are about this rule: not where its norms are
    part of a direction, as in Lamb.
    """

    has_metrics: ClassVar[bool] = True
    """Whether each step leaves norms and limits for `metrics()`. Set it to False in a class whose
    own `step` calls neither `decide` nor `scale`."""

    limit_is: ClassVar[str | None] = None
    """The live value that `limit` returns, whatever the norms are. With it, clipping that never
    clips is found when an optimizer is made."""

    def init_unit(self) -> dict[str, Any]:
        """The state of one unit: numbers or small tensors."""
        return {}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        """The norm that each unit may have this step, from the past alone."""
        raise NotImplementedError(f"{type(self).__name__} has no limit")

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        """The state after a step with this norm, which the rule brought to `clipped`.

        It is called for all units, and kept where both are finite. A norm may be zero.
        """
        return {}

    def measure(self, tensors: TensorList) -> Tensor:
        """The norms of other tensors at this rule's scope: inside `limit`, of group["params"] or
        what is computed from it.
        """
        if tensors.measure is None:
            raise ValueError(
                f'{type(self).__name__}.measure takes group["params"] or group["grads"] as `limit` '
                "receives them, or lists that were computed from these"
            )
        return tensors.measure(tensors)

    def total(self, group: Group) -> Tensor:
        """The norm of the whole update that this link sees, as one: inside `limit`."""
        return group["total"]()

    def dot(self, some: TensorList, others: TensorList, group: Group) -> Tensor:
        """The inner product of every unit of two lists, as group["params"] with group["grads"]:
        inside `limit`.
        """
        return group["dot"](some, others)

    def of_shapes(
        self, norm: Tensor, group: Group, number: Callable[..., float], *args: Any
    ) -> Tensor:
        """number(shape, *args) of the tensor that each unit is of, as a vector: inside `limit`."""
        return group["of_shapes"](norm, number, *args)

    # ------------------------------------------------------------------ what the core does

    @property
    def reach(self) -> Reach:
        """A tensor at most where the units are tensors or slices."""
        if not isinstance(self.scope, str):
            return "tensor"
        return "model" if self.scope == "global" else self.scope

    @property
    def scope(self) -> Scope:
        """`dim`, or "global" where the rule spells it otherwise."""
        return self.dim

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        """The dims that slices of a tensor run along; those that the tensor lacks are ignored."""
        n, dim = tensor.dim(), cast(Any, self.dim)
        mine = {d % n for d in ([dim] if isinstance(dim, int) else dim) if -n <= d < n}
        return tuple([d for d in range(n) if (d in mine) != self.inverse_dims])

    def units(self, buckets: Sequence[Bucket]) -> Units:
        """The units of the rule's scope, and the verbs to work on them."""
        order = norms.measure(self.ord)
        return Units(buckets, self.scope, order, self.dims, type(self).__name__, apart=self.clips)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        self.apply(units, self.decide(units))
        return buckets

    def decide(self, units: Units) -> Decision:
        """What the norms of this step ask for. It is remembered; nothing is divided yet."""
        made, norm = self.init_unit(), units.norm()
        state = units.load(made) if made else {}
        decision = decide(self, norm, state, units.live(), units)
        units.record(decision)
        if state:
            units.store(decision.state)
        return decision

    def apply(self, units: Units, decision: Decision) -> None:
        """Bring every tensor to what was decided."""
        units.scale(decision.divisors)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        if made := self.init_unit():
            self.units(buckets).load(made)
        return buckets

    def _record_unknown(self, buckets: list[Bucket]) -> None:
        if self.has_metrics:
            units = self.units(buckets)
            units.record(units.unknown())

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        own = self.scope is None or self.scope == "layer"
        return {**self.init(param), **(self.init_unit() if own else {})}

    def per_group(self) -> dict[str, Any]:
        units = self.init_unit() if self.scope in ("group", "global") else {}
        return {**super().per_group(), **units}

    def scale(
        self,
        units: Units,
        norm: Tensor,
        limits: Sequence[Tensor | float],
        updates: Sequence[TensorList] | None = None,
    ) -> list[Tensor]:
        """Bring every tensor to its group's limit, in a `step` of your own; returns the divisors of
        each group.

        `updates` are what is scaled, where it is not what flows: a list for each of units.buckets.
        """
        divisors = [divisor(self, norm, limit, units) for limit in limits]
        units.record(Decision(norm, limits, divisors, {}))
        units.scale(divisors, updates)
        return divisors

    def check(self) -> None:
        super().check()
        try:
            norms.measure(self.ord)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: ord {error}") from None
        check_dim(self, self.scope, self.inverse_dims)
        self.require("min_size", at_least=0, integer=True)
        sliced = not (self.scope is None or isinstance(self.scope, str))
        if sliced and (self.init_unit() or type(self).init is not Transform.init):
            raise ValueError(
                f"{type(self).__name__}: dim must be None, 'layer', 'group' or 'global' for a rule "
                f"with memory, got {self.dim!r}"
            )


def check_dim(rule: Transform, dim: Any, inverse_dims: bool) -> None:
    """Raise a sentence unless `dim` and `inverse_dims` make sense."""
    name = type(rule).__name__
    if isinstance(dim, str) and dim not in ("layer", "group", "global"):
        raise ValueError(
            f"{name}: dim must be None, an int, a sequence of ints, 'layer', 'group' or 'global', "
            f"got {dim!r}"
        )
    whole = dim is None or isinstance(dim, str)
    dims = () if whole else (dim if isinstance(dim, (tuple, list)) else (dim,))
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"{name}: dim must be an int or a sequence of ints, got {dim!r}")
    if inverse_dims and whole:
        raise ValueError(f"{name}: inverse_dims=True needs dim to be ints, got dim={dim!r}")
