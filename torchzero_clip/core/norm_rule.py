"""NormRule: the base class of rules about norms, for tensors, slices, layers, groups or models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.decision import Decision, UnitState, decide, divisor
from torchzero_clip.core.engine import Group
from torchzero_clip.core.logical_matrices import Grid
from torchzero_clip.core.norms import Ord
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.transform import Reach, Transform
from torchzero_clip.core.units import Units

Scope: TypeAlias = 'int | Sequence[int] | Literal["layer", "group", "global"] | None'
"""The unit of a norm: a tensor (None), slices along dims (ints), a layer, a group or the model."""


class NormRule(Transform):
    """A base class for rules that scale each unit by min(1, limit / norm).

    A unit is a tensor, a slice of a tensor, a layer, a parameter group, or the whole model.

    A subclass defines `limit`. If the rule remembers earlier norms, it also defines `init_unit` and
    `observe`. `limit` and `observe` receive vectors with one element per unit, so a rule needs no
    loop over tensors.

    Declare `ord`, `dim`, `inverse_dims` or `min_size` as fields to turn them into arguments of the
    rule. State from `init` has tensors in the shapes of the parameters. Only a custom `step` can
    use such state.
    """

    ord = cast(Ord, 2)
    dim = cast(Scope, None)
    inverse_dims = False
    min_size = 1
    open_fields: ClassVar[tuple[str, ...]] = ("ord", "dim", "inverse_dims", "min_size")
    _base_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "ord": (int, float, str),
        "dim": (int, str, tuple, list),
        "inverse_dims": (bool,),
        "min_size": (int,),
    }

    sets_norm: ClassVar[bool] = False
    """Whether the rule scales every unit by limit / norm, so that small norms are scaled up too."""

    clips: ClassVar[bool] = True
    """Whether the rule follows `clip=False` and `norm_group` of parameter groups.

    Set this attribute to False in a rule whose norms are part of an update direction, such as Lamb.
    """

    has_metrics: ClassVar[bool] = True
    """Whether each step stores norms and limits for `metrics()`.

    Set this attribute to False if a custom `step` calls neither `decide` nor `scale`.
    """

    limit_is: ClassVar[str | None] = None
    """The name of the hyperparameter that `limit` always returns, whatever the norms are.

    With this name, the optimizer can warn at construction if clipping can never have an effect.
    """

    _called_by: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "update": ("step", "apply"),
        "limit": ("step", "decide"),
        "observe": ("step", "decide"),
        "decide": ("step",),
        "apply": ("step",),
    }
    _advised: ClassVar[str] = "limit"  # the method to define instead of a method without a caller

    def init_unit(self) -> dict[str, Any]:
        """Return the initial state of one unit: scalars or small tensors, by name."""
        return {}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        """Return the largest norm that each unit may have in this step.

        Infinity means that the unit is not clipped. A limit must be at least 0. A NaN limit makes
        the weights NaN, and a negative limit reverses the update.

        If one norm covers several parameter groups, each group uses the limit that its own
        hyperparameters give.

        Args:
            norm: The norm of each unit.
            state: The state of the units after the previous step, as vectors by name.
            group: The hyperparameters of the group.
        """
        raise NotImplementedError(f"{type(self).__name__} must define limit")

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        """Return the state after this step, as vectors by name.

        The new state is stored for the units whose `norm` and `clipped` are both finite. All other
        units keep their state. A name that the result lacks keeps its old value. A norm may be
        zero.

        If one norm covers several parameter groups, as with `dim="global"`, the norm has one state.
        The library then stores the result for the first of these groups.

        Args:
            norm: The norm of each unit before this rule.
            clipped: The norm of each unit after this rule.
            state: The state of the units before this step.
            group: The hyperparameters of the group.
        """
        return {}

    def measure(self, tensors: TensorList) -> Tensor:
        """Return the norm of each unit of other tensors. Call it inside `limit`.

        Args:
            tensors: group["params"], group["grads"], or a list that was computed from them.
        """
        if tensors.measure is None:
            raise ValueError(
                f"{type(self).__name__}.measure: tensors= must be a TensorList that was "
                'computed from group["params"] or group["grads"] inside limit()'
            )
        return tensors.measure(tensors)

    def total(self, group: Group) -> Tensor:
        """Return the global norm of the update before this rule. Call it inside `limit`."""
        return group["total"]()

    def dot(self, some: TensorList, others: TensorList, group: Group) -> Tensor:
        """Return the inner product of two lists for each unit. Call it inside `limit`.

        For example, the lists may be group["params"] and group["grads"].
        """
        return group["dot"](some, others)

    def of_shapes(
        self, norm: Tensor, group: Group, number: Callable[..., float], *args: Any
    ) -> Tensor:
        """Return a vector with number(shape, *args) for each unit. `shape` is its tensor's shape.

        Call it inside `limit`.
        """
        return group["of_shapes"](norm, number, *args)

    # ------------------------------------------------------------------ what the core does

    @property
    def reach(self) -> Reach:
        """The reach of the rule: "tensor" if units are tensors or slices, otherwise its scope."""
        if not isinstance(self.scope, str):
            return "tensor"
        return "model" if self.scope == "global" else self.scope

    @property
    def scope(self) -> Scope:
        """The kind of unit: `dim`, unless a subclass has another argument for it."""
        return self.dim

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the dims along which slices of a tensor run.

        Dims that the tensor lacks are ignored.
        """
        n = tensor.dim()
        dim = cast(Any, self.dim)
        dims = [dim] if isinstance(dim, int) else dim
        named = {d % n for d in dims if -n <= d < n}
        return tuple([d for d in range(n) if (d in named) != self.inverse_dims])

    def grid(self, name: str, param: Tensor) -> Grid | None:
        """Return the slices of a parameter for the norms of its matrices, or of their rows.

        Rules about matrices define this method instead of `dims`.
        """
        return None

    def units(self, buckets: Sequence[Bucket]) -> Units:
        """Return the units of these buckets, with methods to measure and scale them."""
        order = norms.measure(self.ord)
        name = type(self).__name__
        grids = None if type(self).grid is NormRule.grid else self.grid
        return Units(buckets, self.scope, order, self.dims, name, apart=self.clips, grids=grids)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = self.units(buckets)
        self.apply(units, self.decide(units))
        return buckets

    def decide(self, units: Units) -> Decision:
        """Compute the limits and divisors of this step, and store the new state.

        The updates themselves do not change: see `apply`.
        """
        initial = self.init_unit()
        norm = units.norm()
        state = units.load(initial) if initial else {}
        decision = decide(self, norm, state, units.live(), units)
        units.record(decision)
        if state:
            units.store(decision.state)
        return decision

    def apply(self, units: Units, decision: Decision) -> None:
        """Divide every tensor by its divisor."""
        units.scale(decision.divisors)

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        if initial := self.init_unit():
            self.units(buckets).load(initial)
        return buckets

    def _record_unknown(self, buckets: list[Bucket]) -> None:
        if self.has_metrics:
            units = self.units(buckets)
            units.record(units.unknown())

    def per_parameter(self, param: Tensor, name: str = "") -> dict[str, Any]:
        state = dict(self._init_named(name, param))
        if self.scope is None or self.scope == "layer":
            state.update(self.init_unit())
        return state

    def per_group(self) -> dict[str, Any]:
        state = dict(super().per_group())
        if self.scope in ("group", "global"):
            state.update(self.init_unit())
        return state

    def scale(
        self,
        units: Units,
        norm: Tensor,
        limits: Sequence[Tensor | float],
        updates: Sequence[TensorList] | None = None,
    ) -> list[Tensor]:
        """Scale every unit to the limit of its group, and return the divisors of each group.

        Call it in a custom `step`.

        Args:
            units: The units.
            norm: The norm of each unit.
            limits: For each group, the limit of each unit.
            updates: One list per bucket of `units.buckets`. These lists are scaled instead of the
                updates.
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
        cls = type(self)
        if cls.observe is not NormRule.observe and cls.init_unit is NormRule.init_unit:
            raise TypeError(
                f"{cls.__name__} must not define observe without init_unit: return the initial "
                "state from init_unit"
            )
        self.require("min_size", at_least=0, integer=True)
        sliced = not (self.scope is None or isinstance(self.scope, str))
        if sliced and (self.init_unit() or type(self).init is not Transform.init):
            raise ValueError(
                f"{type(self).__name__}: dim must be None, 'layer', 'group' or 'global', got "
                f"{self.dim!r}. An int is not supported as dim=, because "
                f"{type(self).__name__} keeps state between steps"
            )


def has_own_step(rule: NormRule) -> bool:
    """Return whether the class of a rule overrides other parts of the step than `limit`."""
    cls = type(rule)
    return not (
        cls.step is NormRule.step
        and cls.units is NormRule.units
        and cls.decide is NormRule.decide
        and cls.apply is NormRule.apply
    )


def check_dim(rule: Transform, dim: Any, inverse_dims: bool) -> None:
    """Raise an error unless `dim` and `inverse_dims` are valid and fit together."""
    name = type(rule).__name__
    if isinstance(dim, str) and dim not in ("layer", "group", "global"):
        raise ValueError(
            f"{name}: dim must be None, an int, a sequence of ints, 'layer', 'group' or 'global', "
            f"got {dim!r}"
        )
    whole = dim is None or isinstance(dim, str)
    dims: Sequence[Any] = (dim,)
    if whole:
        dims = ()
    elif isinstance(dim, (tuple, list)):
        dims = dim
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"{name}: dim must be an int or a sequence of ints, got {dim!r}")
    if inverse_dims and whole:
        raise ValueError(
            f"{name}: inverse_dims=True requires dim to be an int or a sequence of ints, got "
            f"dim={dim!r}"
        )
