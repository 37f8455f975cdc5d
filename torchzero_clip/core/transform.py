"""The base classes of links: Transform, and TensorwiseTransform for rules that see one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.bucket import BEGUN, Bucket, begun
from torchzero_clip.core.description import Description
from torchzero_clip.core.engine import FusedKernel, Group, Rule, State, Wrapped, updated
from torchzero_clip.core.lazy import Joined
from torchzero_clip.core.link import scalars_of_model
from torchzero_clip.core.logical_matrices import (
    LogicalMatrices,
    check_layout,
    entry_of,
    matrices_of,
)
from torchzero_clip.core.matrix_steps import (
    planned_matrices,
    prepare_matrices,
    record_unknown,
    step_matrices,
)
from torchzero_clip.core.overrides import drop_declarations, refuse_uncalled
from torchzero_clip.core.sharding.layout import full, layout_of, part_of
from torchzero_clip.core.sharding.owners import by_owners, owners_of
from torchzero_clip.core.tensorlist import TensorList, call_user

if TYPE_CHECKING:
    from torchzero_clip.core.step import Step

Reach: TypeAlias = Literal["tensor", "layer", "group", "model"]
"""The largest set of parameters that a rule processes together."""


class Transform(Description):
    """A link of a chain: a rule such as `ClipNorm`, a direction such as `Adam`, or `LR`.

    To write a link, subclass `Transform` and define `update`, and `init` if the link keeps state.
    Define `step` instead of `update` if the link must see the whole model at once.

    Args:
        target: The tensors that the link changes. "update" changes the update that flows through
            the chain. "grad" changes `p.grad` itself.
        name: The name of the link in the keys of its state, hyperparameters and metrics. None means
            the name of the class.
        state_dtype: "bfloat16" or "float32", the dtype of state in the shape of the parameters. It
            also applies to transforms inside this one. None means the `state_dtype` of the
            optimizer.
    """

    target: Literal["update", "grad"] = field(default="update", kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    state_dtype: Literal["float32", "bfloat16"] | None = field(default=None, kw_only=True)

    _base_types: ClassVar[Mapping[str, tuple[type, ...]]] = {
        "target": (str,),
        "name": (str,),
        "state_dtype": (str,),
    }

    reads: ClassVar[tuple[str, ...]] = ()
    """Names that the rule reads from `group` in addition to its own hyperparameters.

    - `"step"`: the number of steps that the link has done, including the current step. It is a
      0-dim tensor on the device of the parameters.
    - `"loss"`: the loss of the current step, also a 0-dim tensor on that device.
    - `"grads"`: the gradients. `group` always contains them, even without this name. With this
      name, the optimizer accepts `target="grad"` links after a link that has made an update,
      because this rule reads the gradients that such links change.
    - Any other name, such as `"lr"`, is a live hyperparameter of another link. Exactly one link
      nearby must have a hyperparameter of this name.
    """
    place: ClassVar[Literal["any", "first", "step", "end"]] = "any"
    """The place of the link in a chain.

    - `"first"`: before every link that uses the gradients. Guards are an example.
    - `"step"`: anywhere, but only in an optimizer. The link changes the step or the weights, so it
      has no meaning in `Clipper` or `attach`.
    - `"end"`: after `LR`, where the update is the step that is subtracted from the parameters.
    """
    leaves: ClassVar[Literal["update", "gradient", "own", "ones", "set"]] = "update"
    """The kind of tensors that leave the link.

    - `"update"`: an update that grows and shrinks with the update that enters.
    - `"gradient"`: still the gradient.
    - `"own"`: an update whose size does not depend on the update that enters, as after `Normalize`.
    - `"ones"`: like `"own"`, with elements near 1, as after `Adam`.
    - `"set"`: an update whose size is set by a factor that the user chooses, as after `LR`.
    """
    drops: ClassVar[bool | Literal["first"]] = False
    """True if parameters may be missing after the link, or if the link may end the step.

    With `"first"`, the first gradient of a parameter only initializes state. `update` receives this
    gradient, but later links do not see the parameter in this step.
    """
    inner: ClassVar[Literal["chain", "branches"] | None] = None
    """How the transforms inside this one receive the update.

    - `"chain"`: the transforms run one after another, each with all parameters.
    - `"branches"`: each transform receives some of the parameters.
    - None: the transforms do not receive the update.
    """
    complex: ClassVar[Literal["pairs", "whole", "refuse"]] = "pairs"
    """How `update` receives complex tensors.

    - `"pairs"`: as real tensors with a last dim of 2.
    - `"whole"`: as complex tensors.
    - `"refuse"`: not at all. Complex parameters raise an error.
    """
    widens: ClassVar[bool] = False
    """True if `bucket.u` is float32 in a custom `step`, even if the parameters are in half
    precision. Links with state always receive such an update."""
    per_entry: ClassVar[bool] = False
    """True if `update` computes each element from the element at the same position of the other
    lists and from scalars. The engine may then call `update` with parts of the tensors, which saves
    memory on an accelerator. A subclass with another `update` does not inherit this attribute."""
    state_kinds: ClassVar[Mapping[str, Literal["linear", "squares", "weights"]]] = {}
    """The kind of each state tensor in the shape of a parameter, by name.

    - `"linear"`: state that is linear in the update. `InBasis` rotates this state with its basis.
    - `"squares"`: state with one element for each element of the update. `InBasis` permutes it.
    - `"weights"`: weights. They are never stored in bfloat16.
    """
    shown: ClassVar[tuple[str, ...]] = ()
    """The names of model-wide scalars that `metrics()` reports."""
    _called_by: ClassVar[Mapping[str, tuple[str, ...]]] = {"update": ("step",)}
    """The methods of this class that call a method of a subclass, by the name of the called method.

    If a subclass overrides one of these callers, a step may never call the method.
    """

    @classmethod
    def _check_class(cls) -> None:
        """Check that a step calls the methods of the class, and drop declarations of base classes.

        A declaration about `update` or `step` is dropped if this class has another such method.
        """
        super()._check_class()
        refuse_uncalled(cls)
        drop_declarations(cls)

    def init(self, param: Tensor) -> Mapping[str, Any]:
        """Return the initial state of one parameter.

        The library calls this method when the first gradient of the parameter arrives. State in the
        half precision of the parameter is converted to float32. The value None means that this
        parameter has no state of that name. Parameters of another shape may have other names.

        Return new tensors in each call. The library does not copy them, so parameters whose state
        contains the same tensor share its values.
        """
        return {}

    def init_group(self) -> Mapping[str, float]:
        """Return the names of the per-group scalars, and their initial values."""
        return {}

    def init_model(self) -> Mapping[str, float]:
        """Return the names of the model-wide scalars, and their initial values."""
        return {}

    def advance_group(self, numbers: dict[str, Tensor], group: Group) -> Mapping[str, Tensor]:
        """Return the per-group scalars of this step.

        The library calls this method once per step, before `update`. The argument `group` of
        `update` contains the new values.

        Args:
            numbers: The per-group scalars of the previous step, and the model-wide scalars of this
                step. All are 0-dim tensors on the device of the parameters.
            group: The live hyperparameters of the parameter group.
        """
        return {}

    def advance_model(self, numbers: dict[str, Tensor], group: Group) -> Mapping[str, Tensor]:
        """Return the model-wide scalars of this step.

        The library calls this method once per step, before `advance_group`. `group` contains the
        live hyperparameters of the first parameter group.
        """
        return {}

    def _passed_over(self, step: Step, path: str) -> bool:
        """Count a step that a guard skipped before the step reached this link.

        Returns whether the links after this one would have seen the step.
        """
        return True

    def _record_unknown(self, buckets: list[Bucket]) -> None:
        """Record NaN for every metric that this link records in a step."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        """Return the transformed update of one bucket.

        Args:
            u: The updates of the bucket's parameters. You may change this list in place.
            state: The state of the same parameters: a list for each name that `init` returns. The
                library stores changes in place, and also new lists that you assign to these names.
            group: The live hyperparameters, and the lists "params" and "grads".
        """
        raise NotImplementedError(f"{type(self).__name__} must define update or step")

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor | None:
        """Return the averaged weights of one parameter.

        Only links that average weights define this method. Such a link goes after `LR`, its
        `update` receives the step that is subtracted, and its state is never stored in bfloat16.

        Args:
            param: The parameter. If it is sharded, `param` and the tensors in `state` are the
                shards of this rank.
            state: The state of this link for the parameter, by name.
            group: The live hyperparameters.
        """
        return None

    @property
    def reach(self) -> Reach:
        """The largest set of parameters that this rule processes together.

        The reach of transforms inside this rule does not count.

        `release` processes one parameter at a time, so it accepts rules with the reach "tensor". A
        class with a custom `step` has the reach "model" unless it overrides this property.
        """
        only_updates = type(self).step.__module__ == __name__  # the methods of this file
        return "tensor" if only_updates else "model"

    def fused(self, group: Group) -> FusedKernel | None:
        """Return the fused optimizer of torch that does `update` and the subtraction at once.

        Return None if torch has no such optimizer.
        """
        return None

    def affine(self, group: Group) -> tuple[Any, Any] | None:
        """Return (a, b) if `update` is u ← a · u + b · w, and None otherwise.

        An engine may then combine the update with a later pass over the same memory.
        """
        return None

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        """Transform the update of the whole model.

        If this method returns an empty list, the step ends.
        """
        for bucket in buckets:
            bucket.apply(self)
        return begun(buckets) if self.drops == "first" else buckets

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        """Make the state that `step` would make, and return the buckets that later links see."""
        for bucket in buckets if self.drops == "first" else ():
            for state in bucket.param_states:
                state.setdefault(f"{bucket.bound.path}/{BEGUN}", 0)
        return buckets

    def _init_named(self, name: str, param: Tensor) -> Mapping[str, Any]:
        """Return the initial state of a parameter with this name.

        Override this method instead of `init` if the shapes of the state depend on the name. `init`
        must return the same names.
        """
        return self.init(param)

    def per_parameter(self, param: Tensor, name: str = "") -> dict[str, Any]:
        """Return all state of this link in `optimizer.state[param]`, with its initial values."""
        begins = {BEGUN: 0} if self.drops == "first" else {}
        return {**self._init_named(name, param), **begins}

    def per_group(self) -> dict[str, Any]:
        """Return all state of this link in `param_groups[i]["chain"]`, with its initial values."""
        return {**scalars_of_model(self), **self.init_group()}

    def ways(self, name: str, param: Tensor) -> Sequence[int] | None:
        """Return the indices of the inner transforms that process a parameter.

        Return None if the parameter does not reach the links after this one. `explain` calls this
        method.
        """
        return range(len(list(self.children())))

    def rule(self, bucket: Bucket) -> Rule:
        """Return this transform as an engine runs it. Complex tensors reach `update` as pairs."""
        paired = self.complex == "pairs" and bucket.cohort.dtype.is_complex
        return Pairs(self) if paired else self

    def check(self) -> None:
        if "layout" in type(self).__dataclass_fields__:
            check_layout(self)
        if self.state_dtype == "bfloat16" and averages(self):
            raise ValueError(
                f"{type(self).__name__}: state_dtype must be 'float32' or None, got 'bfloat16', "
                "because averaged weights would be too imprecise in bfloat16"
            )
        if self.name is not None and (not isinstance(self.name, str) or "/" in self.name):
            raise ValueError(
                f"{type(self).__name__}: name must be a string without '/', got {self.name!r}"
            )
        if self.place == "end" and self.target != "update":
            raise ValueError(f"{type(self).__name__}: target must be 'update', got {self.target!r}")


def dropping(tfm: Transform) -> list[Transform]:
    """Return this transform and the transforms inside it that may drop a parameter in a step.

    The result includes guards and transforms that write gradients.
    """
    inside = [inner for inner in tfm.walk() if isinstance(inner, Transform)]
    return [x for x in inside if x.target == "grad" or x.place == "first" or x.drops]


def averages(tfm: Any) -> bool:
    """Return whether a description is a transform that averages weights."""
    return getattr(type(tfm), "averaged", Transform.averaged) is not Transform.averaged


class TensorwiseTransform(Transform):
    """A transform that processes one tensor at a time.

    To write such a transform, define `update_tensor`. If the transform keeps state, also define
    `init`. If the state belongs to matrices, define `init_matrix` instead of `init`.
    """

    complex = "whole"
    batched: ClassVar[bool] = False
    """True if the methods about matrices also accept a stack of matrices, with a first dim in `u`
    and in the state. Matrices of one shape are then processed in one call. A subclass does not
    inherit this attribute, so it must set it again."""
    _called_by: ClassVar[Mapping[str, tuple[str, ...]]] = {"update_tensor": ("step", "update")}

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        """Return the transformed update of one tensor.

        Args:
            u: The update, which may be changed in place. Its strides depend on the engine, so call
                `u.reshape(...)` instead of `u.view(...)`.
            state: The state of the parameter, by name.
            group: The live hyperparameters. With "param" in `reads`, `group["param"]` is the
                parameter, in its own dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update_tensor")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = u.own()
        lists = {name: tensors.tensors for name, tensors in state.items()}
        groups = [group] * len(u)
        if "param" in self.reads:
            groups = [{**group, "param": p} for p in group["params"]]
        name = f"{type(self).__name__}.update_tensor"
        results: list[Tensor] = []
        for i, t in enumerate(u.tensors):
            state_of_t = {key: tensors[i] for key, tensors in lists.items()}
            result = call_user(name, self.update_tensor, t, state_of_t, groups[i])
            if not isinstance(result, Tensor):
                raise TypeError(f"{name} must return a tensor, got {result!r}")
            results.append(result)
        if all([new is old for new, old in zip(results, u.tensors, strict=True)]):
            return u  # every tensor was changed in place
        return TensorList(results)  # borrowed, because a result may be a tensor of state

    def operations(self, rows: int, columns: int) -> float:
        """Return the number of floating-point operations that a matrix needs.

        If this number is above 0 and the parameter is sharded, one rank owns the parameter and does
        the work. `update` then receives the whole tensor on that rank, without state and gradients.
        If the class has "param" in `reads`, `update` also receives the parameter.
        """
        return 0.0

    def init_matrix(self, rows: int, columns: int) -> Mapping[str, Tensor]:
        """Return the initial state of one matrix, with tensors of any shape.

        If a parameter is sharded, the rank that owns it stores this state. A class with such state
        receives only matrices. If the class is `batched`, it receives stacks of matrices, otherwise
        single matrices. Other parameters pass unchanged.
        """
        return {}

    def observe_matrix(
        self, u: Tensor, state: dict[str, Tensor], group: Group
    ) -> Mapping[str, Tensor]:
        """Return new values of state from the update of a matrix.

        The library calls this method in every step, before `update_tensor`. If a new value is not
        finite, the matrix keeps its old state. `group["first"]` is True in the first step of a
        parameter.
        """
        return {}

    def refresh_matrix(self, state: dict[str, Tensor], group: Group) -> Mapping[str, Tensor]:
        """Return new values of state that are expensive to compute, such as a decomposition.

        The library calls this method in the first step and then every `every` steps. `every` is a
        field of the class. Without this field, the library calls the method in every step. If the
        class has a field `stagger` and its value is True, different parameters refresh in different
        steps. If a new value is not finite, the matrix keeps its old state.
        """
        return {}

    def is_due(self, step: int) -> bool:
        """Return whether the state of parameters is refreshed in a step. Steps count from 0.

        The first step of a parameter always refreshes.
        """
        return step % getattr(self, "every", 1) == 0

    @property
    def rhythm(self) -> str:
        """The steps in which the class refreshes, in words for `explain`."""
        every = getattr(self, "every", 1)
        return f"in the first step and every {every} steps" if every > 1 else "in every step"

    def matrices_of(self, name: str, param: Tensor) -> LogicalMatrices | None:
        """Return the matrices of a parameter, or None for a parameter without matrices.

        If the class has a field `layout`, the layout decides. Otherwise a tensor of two dims is a
        matrix, a tensor of four or more dims is a matrix of shape (first, rest), and a tensor of
        three dims raises an error. Vectors and empty tensors have no matrices.
        """
        if not param.numel() or (param.dim() < 2 and entry_of(self, name, param) is None):
            return None
        return matrices_of(self, name, param)

    @property
    def keeps_matrices(self) -> bool:
        """Whether the class keeps state of matrices."""
        return type(self).init_matrix is not TensorwiseTransform.init_matrix

    @property
    def refreshes(self) -> bool:
        """Whether the class has state that is refreshed only in some steps."""
        return type(self).refresh_matrix is not TensorwiseTransform.refresh_matrix

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        if not self.keeps_matrices:
            return super().step(buckets)
        buckets = step_matrices(self, buckets)
        return begun(buckets) if self.drops == "first" else buckets

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        if self.keeps_matrices:
            prepare_matrices(self, buckets)
        return super().prepare(buckets)

    def _record_unknown(self, buckets: list[Bucket]) -> None:
        if self.keeps_matrices:
            record_unknown(buckets)

    def per_parameter(self, param: Tensor, name: str = "") -> dict[str, Any]:
        begins = {BEGUN: 0} if self.keeps_matrices and self.refreshes else {}
        return {**super().per_parameter(param, name), **begins}

    def check(self) -> None:
        super().check()
        if self.keeps_matrices and type(self).init is not Transform.init:
            raise TypeError(
                f"{type(self).__name__} must not define both init and init_matrix: return all "
                "state from init_matrix"
            )
        own_update = type(self).update is not TensorwiseTransform.update
        if self.keeps_matrices and own_update and type(self).step is TensorwiseTransform.step:
            raise TypeError(
                f"{type(self).__name__} must not define both update and init_matrix: define "
                "update_tensor instead of update"
            )
        for name in ("observe_matrix", "refresh_matrix"):
            is_own = getattr(type(self), name) is not getattr(TensorwiseTransform, name)
            if is_own and not self.keeps_matrices:
                raise TypeError(
                    f"{type(self).__name__} must not define {name} without init_matrix: return "
                    "all state from init_matrix"
                )

    def rule(self, bucket: Bucket) -> Rule:
        """Return this transform as an engine runs it: with whole tensors instead of shards.

        The result for a shard is not a shard of the result for the whole tensor.
        """
        if not any(bucket.cohort.layouts):
            return super().rule(bucket)
        if type(self).operations is TensorwiseTransform.operations:
            return Gathered(self, bucket)
        costs = []
        for matrices in planned_matrices(bucket):
            sizes = [] if matrices is None else matrices.sizes
            costs.append(sum([self.operations(*size) for size in sizes]))
        return Owned(self, bucket, costs) if any(costs) else Gathered(self, bucket)


@dataclass
class Pairs(Wrapped):
    """A rule that receives complex tensors as real tensors with a last dim of 2."""

    inner: Transform

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        real_state = {name: pairs(tensors) for name, tensors in state.items()}
        group |= {"params": pairs(group["params"]), "grads": pairs(group["grads"])}
        return unpaired(updated(self.inner, pairs(u), real_state, group))


@dataclass
class Gathered(Wrapped):
    """A rule that receives whole tensors, gathered from the shards of all ranks."""

    inner: TensorwiseTransform
    bucket: Bucket

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        bucket = self.bucket
        sharded_state = bucket.held()
        group |= {name: Joined([group[name]], bucket.whole) for name in ("params", "grads")}
        whole_state: State = {}
        for name, sharded in sharded_state.items():
            gathered = [full(t).to(state[name].dtype) for t in sharded]
            whole_state[name] = TensorList(gathered, owned=True)
        whole_u = TensorList(bucket.whole(u.own()), owned=True)
        result = updated(self.inner, whole_u, whole_state, group)
        for name, sharded in sharded_state.items():
            both = zip(whole_state[name], sharded, strict=True)
            state[name].copy_(TensorList([part_of(new, layout_of(old)) for new, old in both]))
        return TensorList(bucket.parts(result))


@dataclass
class Owned(Wrapped):
    """A rule that receives whole tensors, each on the rank that owns it."""

    inner: TensorwiseTransform
    bucket: Bucket
    costs: Sequence[float]

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        live = {name: value for name, value in group.items() if name not in ("params", "grads")}
        params = [group["params"].tensors] if "param" in self.inner.reads else []

        def work(where: list[int], whole: list[Tensor], *params: list[Tensor]) -> list[Tensor]:
            owned = dict(live)
            for name, values in live.items():
                if isinstance(values, list):  # one value for each parameter
                    owned[name] = [values[i] for i in where]
            if params:
                owned["params"] = TensorList(params[0])
            return updated(self.inner, TensorList(whole, owned=True), {}, owned).tensors

        layouts = self.bucket.cohort.layouts
        results = by_owners([u.tensors, *params], layouts, owners_of(layouts, self.costs), work)
        return u.copy_(TensorList(results))


def pairs(tensors: TensorList) -> TensorList:
    """Return complex tensors as real tensors with a last dim of 2."""
    if not tensors.dtype.is_complex:
        return tensors
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors.tensors]
    return TensorList(real, owned=tensors.owned)


def unpaired(tensors: TensorList) -> TensorList:
    """Return real tensors with a last dim of 2 as complex tensors: the inverse of `pairs`."""
    return TensorList([torch.view_as_complex(t) for t in tensors.tensors], owned=tensors.owned)
