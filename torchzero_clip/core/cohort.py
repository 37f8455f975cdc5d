"""A cohort: the parameters of a bucket, with their shapes, layouts and names.

The optimizer keeps cohorts from step to step, as long as the parameters stay the same. The place of
a parameter is its index in its group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.formats.stochastic import Elements, keys_of
from torchzero_clip.core.names import UnknownKey
from torchzero_clip.core.sharding.layout import Layout, layout_of, placements
from torchzero_clip.core.stacks import batches
from torchzero_clip.core.state import state_dtype
from torchzero_clip.core.tensor_kinds import DEVICE, DTYPE, LAYOUT, SHAPE, all_plain, same_shapes

VALUES_KEPT = 64
"""The largest number of computed values that a `Roster` keeps."""
Grads: TypeAlias = "Sequence[Any] | dict[int, Any]"
"""The gradients of a group, indexed by the places of the parameters."""
StateNames: TypeAlias = "tuple[dict[str, bool], list[int]]"
"""The state names of some parameters, and the indices of these parameters in their cohort.

Each name has a flag: whether the state has the shape of its parameter.
"""
TAG = "grad_norm_group"
"""An attribute that Megatron-LM sets on parameters. It counts as a `norm_group`."""


@dataclass(eq=False)
class Cohort:
    """Parameters of one group that share a device, a dtype and the dtype of their gradients.

    Args:
        index: The index of the group.
        places: The place of each parameter in its group.
        names: The name of each parameter, or None.
        originals: The parameters as the optimizer stores them, whole or sharded.
        grad_dtype: The dtype of the gradients.
        clips: The value of "clip" in the group: whether norm rules apply to the parameters.
        norm_group: The name of the norm group. All parameters of a norm group share one norm. None
            if the parameters have no norm group.
    """

    index: int
    places: list[int]
    names: list[str | None]
    originals: list[Tensor]
    grad_dtype: torch.dtype
    clips: bool = True
    norm_group: str | None = None

    def __post_init__(self) -> None:
        params = self.originals
        self.plain = all_plain(params)
        self.layouts: list[Layout | None] = list(map(layout_of, params))
        self.sharded = any(self.layouts)
        self._placements = list(map(placements, params))
        # a parameter of an unknown subclass of Tensor may change in a way that `same` cannot see
        pairs = zip(params, self.layouts, strict=True)
        self._comparable = self.plain or all([layout or all_plain([p]) for p, layout in pairs])
        self.device = params[0].device
        self.dtype = params[0].dtype
        self.state_dtype = state_dtype(params[0])
        self.shapes = [p.shape for p in params]
        self.sizes = [p.numel() for p in params]  # with the elements on other ranks
        self.key = (self.index, self.device, self.dtype)
        self.checked: set[str] = set()  # the keys of state that is known to have these shapes
        self.has_checked_dtypes = False  # whether state is known to have the right dtypes
        self._kinds: dict[str, list[StateNames]] = {}
        self._keys: dict[tuple[int, ...], Tensor] = {}
        self._elements: Elements | None = None

    def keys(self, *numbers: int) -> Tensor:
        """Return an integer for each parameter: a hash of the parameter's place and `numbers`."""
        if numbers not in self._keys:
            self._keys[numbers] = keys_of(self.places, (self.index, *numbers), self.device)
        return self._keys[numbers]

    @property
    def elements(self) -> Elements:
        """The elements of the parameters."""
        if self._elements is None:
            self._elements = Elements(self.originals, self.layouts)
        return self._elements

    @property
    def vectors(self) -> list[Tensor]:
        """The tensors that this cohort keeps from step to step, and never changes."""
        starts = [self._elements.starts] if self._elements else []
        return [*self._keys.values(), *starts]

    def same(self, group: Mapping[str, Any], grads: Grads) -> bool:
        """Return whether the group still has these parameters, with the same shapes and dtypes."""
        params = self.of(group["params"])
        grads = self.of(grads)
        names = self.of(group.get("param_names") or [None] * len(group["params"]))
        # every step asks this, so each comparison is a map over C functions
        return (
            self._comparable
            and self.names == names
            and (self.plain or self._placements == list(map(placements, params)))
            and all(map(operator.is_, params, self.originals))
            and list(map(SHAPE, params)) == self.shapes
            and list(map(SHAPE, grads)) == self.shapes
            and set(map(DTYPE, params)) == {self.dtype}
            and set(map(DTYPE, grads)) == {self.grad_dtype}
            and set(map(LAYOUT, grads)) == {torch.strided}
            and set(map(DEVICE, params)) == {self.device}
        )

    def check_shapes(self, key: str, row: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        """Raise an error if the shape of a parameter differs from the shape of its state."""
        if same_shapes(row, self.originals):
            self.checked.add(key)  # if the shape of a parameter changes, there is a new cohort
            return
        triples = zip(self.places, self.originals, row, strict=True)
        place, p, t = next((place, p, t) for place, p, t in triples if p.shape != t.shape)
        raise ValueError(
            f"{label(self.index, group, place)} has shape {tuple(p.shape)}, but its state {key!r} "
            f"has shape {tuple(t.shape)}: after changing the shape of a parameter p, delete "
            "optimizer.state[p], or construct a new optimizer"
        )

    def state_error(self, key: str, values: Sequence[Any], group: Mapping[str, Any]) -> Exception:
        """Return an error for the first value of state that is missing or not a tensor."""
        first = next(i for i, value in enumerate(values) if not isinstance(value, Tensor))
        value = values[first]
        message = (
            f"the state {key!r} of {label(self.index, group, self.places[first])} must be a "
            f"tensor, got {value!r}: restore the tensor, or delete optimizer.state[p] of this "
            "parameter p, so that all its state restarts"
        )
        return UnknownKey(message) if value is None else TypeError(message)

    def kinds(self, link: str, names: Callable[[Tensor], dict[str, bool]]) -> list[StateNames]:
        """Return the state names of the parameters at a link, with the indices of the parameters.

        Parameters that have the same state names share one item of the result.
        """
        if link not in self._kinds:
            state_names = list(map(names, self.originals))
            kinds = [frozenset(flags.items()) for flags in state_names]
            self._kinds[link] = [(state_names[batch[0]], batch) for batch in batches(kinds)]
        return self._kinds[link]

    def select(self, where: Sequence[int]) -> Cohort:
        """Return a cohort of the parameters with these indices."""
        return replace(
            self,
            places=[self.places[i] for i in where],
            names=[self.names[i] for i in where],
            originals=[self.originals[i] for i in where],
        )

    def of(self, row: Grads) -> Sequence[Any]:
        """Return the values of these parameters from a row with a value for each place."""
        if isinstance(row, dict) or len(row) != len(self.places):
            return [row[i] for i in self.places]
        return row


class Roster:
    """The cohorts of all groups, and values that are computed once from cohorts.

    The roster keeps cohorts and values as long as the parameters stay the same.

    Args:
        reads_tags: Whether the attribute `grad_norm_group` of a parameter sets its norm group.
            Functions that clip like torch ignore this attribute, because torch computes one norm of
            all gradients.
    """

    def __init__(self, reads_tags: bool = True) -> None:
        self._reads_tags = reads_tags
        self._known: dict[int, tuple[Any, list[Cohort]]] = {}
        self._values: dict[Hashable, Any] = {}

    def of(
        self, groups: Sequence[Mapping[str, Any]], grads_of_groups: Sequence[Grads]
    ) -> list[tuple[Cohort, Sequence[Any]]]:
        """Return the cohorts of all parameters that have a gradient, with their gradients."""
        if len(self._known) > len(groups):
            self._known = {g: known for g, known in self._known.items() if g < len(groups)}
            self._values.clear()
        return [
            (cohort, cohort.of(grads))
            for index, (group, grads) in enumerate(zip(groups, grads_of_groups, strict=True))
            for cohort in self.cohorts(index, group, grads)
        ]

    def cohorts(self, index: int, group: Mapping[str, Any], grads: Grads) -> list[Cohort]:
        """Return the cohorts of the parameters of a group that have a gradient."""
        by_place = grads.items() if isinstance(grads, dict) else enumerate(grads)
        places = [i for i, grad in by_place if grad is not None]
        tags = [getattr(p, TAG, None) for p in group["params"]] if self._reads_tags else None
        if torch.compiler.is_compiling():  # the cohorts are constants of the graph
            return _divided(index, group, grads, places, tags)
        key = (places, group.get("clip"), group.get("norm_group"), tags)
        known_key, cohorts = self._known.get(index, (None, []))
        if known_key != key or not all([cohort.same(group, grads) for cohort in cohorts]):
            cohorts = _divided(index, group, grads, places, tags)
            self._known[index] = key, cohorts
            self._values.clear()
        return cohorts

    @property
    def vectors(self) -> list[Tensor]:
        """The tensors that cohorts and divisions keep from step to step, and never change."""
        cohorts = [cohort for _, cohorts in self._known.values() for cohort in cohorts]
        keepers = [*cohorts, *self._values.values()]
        return [t for keeper in keepers for t in getattr(keeper, "vectors", ())]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key. The first call for a key computes the value with `make`.

        The key must contain the cohorts from which `make` computes the value.
        """
        if torch.compiler.is_compiling():  # the value is a constant of the graph
            return make()
        if key not in self._values:
            if len(self._values) >= VALUES_KEPT:
                self._values.clear()
            self._values[key] = make()
        return self._values[key]


def _divided(
    index: int,
    group: Mapping[str, Any],
    grads: Grads,
    with_grad: Sequence[int],
    tags: Sequence[str | None] | None,
) -> list[Cohort]:
    """Divide the parameters of a group into cohorts by device, dtypes and norm group.

    Args:
        index: The index of the group.
        group: The group.
        grads: The gradients.
        with_grad: The places of the parameters that have a gradient.
        tags: The norm groups that are set on the parameters, or None if tags are not read.
    """
    params = group["params"]
    names = group.get("param_names") or [None] * len(params)
    _check_grads(index, group, grads, with_grad)
    own = group.get("norm_group")
    norm_groups = [own] * len(params) if tags is None else [tag or own for tag in tags]
    kinds = [(params[i].device, params[i].dtype, grads[i].dtype, norm_groups[i]) for i in with_grad]
    cohorts = []
    for batch in batches(kinds):
        places = [with_grad[k] for k in batch]
        cohort = Cohort(
            index,
            places,
            [names[i] for i in places],
            [params[i] for i in places],
            grads[places[0]].dtype,
            group.get("clip", True),
            norm_groups[places[0]],
        )
        cohorts.append(cohort)
    return cohorts


def _check_grads(
    index: int, group: Mapping[str, Any], grads: Grads, with_grad: Sequence[int]
) -> None:
    """Raise an error if a gradient is sparse, or has another shape than its parameter."""
    params = group["params"]
    sparse = [i for i in with_grad if grads[i].layout is not torch.strided]
    if sparse:
        i = sparse[0]
        raise TypeError(
            "sparse gradients are not supported, got a sparse gradient of shape "
            f"{tuple(params[i].shape)} for {label(index, group, i)}: construct the layer with "
            "sparse=False, or use a separate torch.optim.SparseAdam for this parameter"
        )
    if not same_shapes([grads[i] for i in with_grad], [params[i] for i in with_grad]):
        i = next(i for i in with_grad if grads[i].shape != params[i].shape)
        raise ValueError(
            f"{label(index, group, i)} has shape {tuple(params[i].shape)}, but its gradient has "
            f"shape {tuple(grads[i].shape)}: set the gradient to None after changing the shape of "
            "a parameter"
        )


def label(index: int, group: Mapping[str, Any], place: int) -> str:
    """Return the name of a parameter for error messages."""
    names = group.get("param_names")
    name = f" ({names[place]})" if names else ""
    return f"parameter {place} of group {index}{name}"
