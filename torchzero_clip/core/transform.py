"""Transform: one step of a chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.bucket import BEGUN, Bucket, begun
from torchzero_clip.core.description import Description
from torchzero_clip.core.engine import FusedKernel, Group, Rule, State, Wrapped, updated
from torchzero_clip.core.lazy import Joined
from torchzero_clip.core.link import numbers_of_model
from torchzero_clip.core.matrix_steps import prepare_matrices, record_unknown, step_matrices
from torchzero_clip.core.sharding.layout import full, layout_of, part_of
from torchzero_clip.core.sharding.owners import by_owners, owners_of
from torchzero_clip.core.tensorlist import TensorList, call_user

Reach: TypeAlias = Literal["tensor", "layer", "group", "model"]
"""What a rule takes together: at most a tensor, or more."""


class Transform(Description):
    """One link of a chain. Write `update` (and `init` for state), or `step` to see the whole model.

    Args:
        target: "update" transforms the update on its way; "grad" rewrites `p.grad` itself.
        name: Stands in the names of state and hyperparameters instead of the class name.
        state_dtype: "bfloat16" or "float32" for state in the shape of the parameters, here and in
            transforms inside; None as the optimizer says.
    """

    target: Literal["update", "grad"] = field(default="update", kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    state_dtype: Literal["float32", "bfloat16"] | None = field(default=None, kw_only=True)

    reads: ClassVar[tuple[str, ...]] = ()
    """What `group` shall have besides: live values of other links, as "lr", of which one link near
    must own each; "step", how many steps the link has done, this one included, as a 0-dim tensor on
    the device; "loss", that of the step, there too; "grads", which are there always, so that
    target="grad" links before it matter."""
    place: ClassVar[Literal["any", "first", "step", "end"]] = "any"
    """Where the link stands: "first", where nothing has seen the gradients, as a guard; "step" says
    that it is about the step or the weights, and has no meaning for a gradient that another
    optimizer takes; and "end" that it stands behind LR besides, and sees what is subtracted."""
    leaves: ClassVar[Literal["update", "gradient", "own", "ones", "set"]] = "update"
    """What leaves the link: an update whose size depends on that of what enters; still the
    "gradient"; or an update of a size of its "own", as behind Normalize, one with entries near one,
    "ones", as behind Adam, or one whose size is "set" by a factor that the user gives, as LR."""
    drops: ClassVar[bool | Literal["first"]] = False
    """Set where parameters may be missing after the link, or the step may end. With "first" the
    first gradient of a parameter makes state alone: `update` sees it, and then the parameter is
    left out of the rest of the step, as one without gradient."""
    inner: ClassVar[Literal["chain", "branches"] | None] = None
    """How inner transforms see the update: "chain", all of it in turn; "branches", each some
    parameters; None, not at all."""
    complex: ClassVar[Literal["pairs", "whole", "refuse"]] = "pairs"
    """How `update` meets complex tensors: as pairs of real numbers, as they are, or not at all."""
    widens: ClassVar[bool] = False
    """Set where a `step` of your own takes `bucket.u` in float32 where parameters are in half
    precision, as a link with state does."""
    per_entry: ClassVar[bool] = False
    """Set where `update` takes each entry by itself, with the state and the numbers of its tensor:
    on an accelerator it then goes over a model in pieces, and takes little memory."""
    state_kinds: ClassVar[Mapping[str, Literal["linear", "squares", "weights"]]] = {}
    """What state in the shape of a parameter is: "linear" in the update, which `InBasis` turns
    along; "squares", with an entry for each of the update's, which it sorts along; or "weights",
    which are never kept in bfloat16."""
    shown: ClassVar[tuple[str, ...]] = ()
    """Numbers of the model that `metrics()` shows."""

    def init(self, param: Tensor) -> Mapping[str, Any]:
        """The state of one parameter when its first gradient comes.

        Parameters of other shapes may have other names, or None for a name that one has not. What
        is in half precision as the parameter is becomes float32.
        """
        return {}

    def init_group(self) -> Mapping[str, float]:
        """The numbers that are kept once for each group, and what they begin with."""
        return {}

    def init_model(self) -> Mapping[str, float]:
        """The numbers that are kept once for all groups, and what they begin with."""
        return {}

    def advance_group(self, numbers: dict[str, Tensor], group: Group) -> Mapping[str, Tensor]:
        """The numbers of a group in this step, from those of the step before and the live values.

        It is called once a step, before `update`, whose `group` has what it returns. All are 0-dim
        tensors on the device; those of the model may be read.
        """
        return {}

    def advance_model(self, numbers: dict[str, Tensor], group: Group) -> Mapping[str, Tensor]:
        """The same for the numbers of the model, with the live values of the first group."""
        return {}

    def _passed_over(self, step: Any, path: str) -> bool:
        """Note a step that a guard skipped before it reached this link, whose path is given.

        Returns whether the links after this one would have seen the step.
        """
        return True

    def _record_unknown(self, buckets: list[Bucket]) -> None:
        """Record NaN under every name that a step leaves for `metrics()`."""

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        """The transformed update of one bucket."""
        raise NotImplementedError(f"{type(self).__name__} has neither update nor step")

    def averaged(self, param: Tensor, state: dict[str, Tensor], group: Group) -> Tensor | None:
        """The weights for evaluation, of a parameter, the link's state of it and the live values.

        A class that has some writes this. Such a link stands behind LR, sees the step that is
        subtracted, and its state is never kept in bfloat16. Of sharded tensors it gets the parts.
        """
        return None

    @property
    def reach(self) -> Reach:
        """How far the rule looks, transforms inside it aside: what gets one tensor at a time, as
        `release` does, takes rules that reach no further. One that writes `step` must say so.
        """
        plain = type(self).step.__module__ == __name__  # one of those here, which only call update
        return "tensor" if plain else "model"

    def fused(self, group: Group) -> FusedKernel | None:
        """The fused optimizer of torch that does `update` and the subtraction at once, if any."""
        return None

    def affine(self, group: Group) -> tuple[Any, Any] | None:
        """(a, b) where `update` is u ← a · u + b · w, so that an engine may do it later."""
        return None

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        """Transform the whole model; an empty list ends the step."""
        for bucket in buckets:
            bucket.apply(self)
        return begun(buckets) if self.drops == "first" else buckets

    def prepare(self, buckets: list[Bucket]) -> list[Bucket]:
        """Make the state that `step` would make; returns what later links will see."""
        for bucket in buckets if self.drops == "first" else ():
            for state in bucket.param_states:
                state.setdefault(f"{bucket.bound.path}/{BEGUN}", 0)
        return buckets

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        """The state in `optimizer.state[param]`: what `init` makes, and the numbers of its unit."""
        return {**self.init(param), **({BEGUN: 0} if self.drops == "first" else {})}

    def per_group(self) -> dict[str, Any]:
        """The state that a rule keeps once for a group or for all groups."""
        return {**numbers_of_model(self), **self.init_group()}

    def ways(self, name: str, param: Tensor) -> Sequence[int] | None:
        """The transforms inside that a parameter goes through, by their place; None where it takes
        no part in what comes behind this link. `explain` asks.
        """
        return range(len(list(self.children())))

    def rule(self, bucket: Bucket) -> Rule:
        """The transform as engines take it: complex tensors reach `update` as pairs."""
        paired = self.complex == "pairs" and bucket.cohort.dtype.is_complex
        return Pairs(self) if paired else self

    def check(self) -> None:
        if self.state_dtype == "bfloat16" and averages(self):
            raise ValueError(
                f"{type(self).__name__}: state_dtype must be 'float32' or None, since weights for "
                "evaluation are made of its state, got 'bfloat16'"
            )
        if self.name is not None and (not isinstance(self.name, str) or "/" in self.name):
            raise ValueError(
                f"{type(self).__name__}: name must be a string without '/', got {self.name!r}"
            )
        if self.place == "end" and self.target != "update":
            raise ValueError(
                f"{type(self).__name__}: target must be 'update', the step that is subtracted, got "
                f"{self.target!r}"
            )


def dropping(tfm: Transform) -> list[Transform]:
    """The transforms, it and those inside, that may not return an update for every parameter in
    every step, or that write gradients.
    """
    inside = [one for one in tfm.walk() if isinstance(one, Transform)]
    return [one for one in inside if one.target == "grad" or one.place == "first" or one.drops]


def averages(tfm: Any) -> bool:
    """Whether a description is a transform that has weights for evaluation."""
    return getattr(type(tfm), "averaged", Transform.averaged) is not Transform.averaged


class TensorwiseTransform(Transform):
    """A transform that needs one tensor at a time: write `update_tensor`."""

    complex = "whole"
    batched: ClassVar[bool] = False
    """Set where the methods about a matrix also take a stack of them, with a first dim in `u` and
    in state: those of one shape are then one call. A class says so itself; it is not inherited."""

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Group) -> Tensor:
        """The transformed update of one tensor; `u` may be written.

        The strides of `u` depend on the engine: call `u.reshape(...)`, not `u.view(...)`.
        With "param" in `reads`, `group["param"]` is the parameter, in its own dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update_tensor")

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        u = u.own()
        lists = {name: tensors.tensors for name, tensors in state.items()}
        groups = [group] * len(u)
        if "param" in self.reads:
            groups = [{**group, "param": p} for p in group["params"]]
        name = f"{type(self).__name__}.update_tensor"
        out: list[Tensor] = []
        for i, t in enumerate(u.tensors):
            held = {key: row[i] for key, row in lists.items()}
            out.append(call_user(name, self.update_tensor, t, held, groups[i]))
        if all([new is old for new, old in zip(out, u.tensors, strict=True)]):
            return u  # written in place
        return TensorList(out)  # may be state: borrowed

    def operations(self, param: Tensor) -> float:
        """Floating-point operations for a parameter; above 0, where it is sharded, one rank does
        them, its owner, and `update` sees it there, without state and gradients, and with
        parameters where the class reads them.
        """
        return 0.0

    def init_matrix(self, rows: int, columns: int) -> Mapping[str, Tensor]:
        """The state of one matrix, of any shapes: it lies with the owner of a sharded one.

        A class that has some sees matrices alone, each by itself or `batched`; other parameters
        pass unchanged.
        """
        return {}

    def observe_matrix(
        self, u: Tensor, state: dict[str, Tensor], group: Group
    ) -> Mapping[str, Tensor]:
        """New values of state from a matrix of the update, before `update_tensor` sees it.

        They are taken where all are finite. `group["first"]`: whether the parameter begins.
        """
        return {}

    def refresh_matrix(self, state: dict[str, Tensor], group: Group) -> Mapping[str, Tensor]:
        """New values of state that are dear, in the first step and in every `every`-th after it.

        They are taken where all are finite. `every` is a field of the class, or 1; where one named
        `stagger` is true, parameters take turns.
        """
        return {}

    def is_due(self, step: int) -> bool:
        """Whether a step, counted from 0, refreshes, besides the first one of a parameter."""
        return step % getattr(self, "every", 1) == 0

    @property
    def rhythm(self) -> str:
        """When the class refreshes; `explain` asks."""
        every = getattr(self, "every", 1)
        return f"in its first step and every {every} steps" if every > 1 else "in every step"

    def rows_of(self, name: str, param: Tensor) -> Sequence[int]:
        """The rows of each matrix that a parameter is, as (first, rest); none where it is none."""
        return [len(param)] if param.dim() > 1 and param.numel() else []

    @property
    def keeps_matrices(self) -> bool:
        """Whether the class keeps state of matrices."""
        return type(self).init_matrix is not TensorwiseTransform.init_matrix

    @property
    def refreshes(self) -> bool:
        """Whether the class has state that is renewed now and then."""
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

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        begins = {BEGUN: 0} if self.keeps_matrices and self.refreshes else {}
        return {**super().per_parameter(param), **begins}

    def check(self) -> None:
        super().check()
        if self.keeps_matrices and type(self).init is not Transform.init:
            raise TypeError(
                f"{type(self).__name__} has both init and init_matrix: the owner of a matrix sees "
                "all its state in one place, so make what init makes in init_matrix"
            )

    def rule(self, bucket: Bucket) -> Rule:
        """Sharded tensors are made whole, since the function of a part is not part of it."""
        if not any(bucket.cohort.layouts):
            return super().rule(bucket)
        costs = [self.operations(p) for p in bucket.originals]
        return Owned(self, bucket, costs) if any(costs) else Gathered(self, bucket)


class Pairs(Wrapped):
    """A rule that sees complex tensors as real ones with a last dim of two."""

    def __init__(self, rule: Transform) -> None:
        self.inner = rule

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        real = {name: pairs(tensors) for name, tensors in state.items()}
        group |= {"params": pairs(group["params"]), "grads": pairs(group["grads"])}
        return unpaired(updated(self.inner, pairs(u), real, group))

    def affine(self, group: Group) -> tuple[Any, Any] | None:
        return self.inner.affine(group)  # the same of complex numbers as of their parts


class Gathered(Wrapped):
    """A rule that sees whole tensors where this process holds a part of each."""

    def __init__(self, rule: TensorwiseTransform, bucket: Bucket) -> None:
        self.inner, self.bucket = rule, bucket

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        bucket, held = self.bucket, self.bucket.held()
        group |= {name: Joined([group[name]], bucket.whole) for name in ("params", "grads")}
        whole: State = {}
        for name, row in held.items():
            gathered = [full(t).to(state[name].dtype) for t in row]
            whole[name] = TensorList(gathered, owned=True)
        flowing = TensorList(bucket.whole(u.own()), owned=True)
        out = updated(self.inner, flowing, whole, group)
        for name, row in held.items():
            pairs = zip(whole[name], row, strict=True)
            state[name].copy_(TensorList([part_of(new, layout_of(old)) for new, old in pairs]))
        return TensorList(bucket.parts(out))


class Owned(Wrapped):
    """A rule that sees whole tensors on the ranks that own them."""

    def __init__(self, rule: TensorwiseTransform, bucket: Bucket, costs: Sequence[float]) -> None:
        self.inner, self.bucket, self.costs = rule, bucket, costs

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        live = {name: value for name, value in group.items() if name not in ("params", "grads")}
        beside = [group["params"].tensors] if "param" in self.inner.reads else []

        def work(where: list[int], whole: list[Tensor], *params: list[Tensor]) -> list[Tensor]:
            lists = {name: x for name, x in live.items() if isinstance(x, list)}  # of parameters
            some = live | {name: [x[i] for i in where] for name, x in lists.items()}
            if params:
                some["params"] = TensorList(params[0])
            return updated(self.inner, TensorList(whole, owned=True), {}, some).tensors

        layouts = self.bucket.cohort.layouts
        made = by_owners([u.tensors, *beside], layouts, owners_of(layouts, self.costs), work)
        return u.copy_(TensorList(made))


def pairs(tensors: TensorList) -> TensorList:
    """Complex tensors as real ones with a last dim of two."""
    if not tensors.dtype.is_complex:
        return tensors
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors.tensors]
    return TensorList(real, owned=tensors.owned)


def unpaired(tensors: TensorList) -> TensorList:
    """Real tensors with a last dim of two as complex ones: the inverse of `pairs`."""
    return TensorList([torch.view_as_complex(t) for t in tensors.tensors], owned=tensors.owned)
