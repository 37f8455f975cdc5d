"""Cohort: the parameters of a bucket, their shapes, layouts and names, kept from step to step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.formats.stochastic import Elements, keys_of
from torchzero_clip.core.sharding.layout import Layout, layout_of, placements
from torchzero_clip.core.stacks import batches
from torchzero_clip.core.state import state_dtype
from torchzero_clip.core.tensor_kinds import DEVICE, DTYPE, LAYOUT, SHAPE, all_plain, same_shapes

MOST = 64  # values that a roster keeps
Grads: TypeAlias = "Sequence[Any] | dict[int, Any]"
"""The gradients of a group by the places of their parameters."""
StateNames: TypeAlias = "tuple[dict[str, bool], list[int]]"
"""Names of state, with a flag where it has the shape of its parameter, and whose they are."""
TAG = "grad_norm_group"
"""An attribute of parameters, as Megatron-LM sets it, that counts as a `norm_group` of its own."""


class Cohort:
    """Parameters of one group that share a device and a dtype, and whose gradients share one.

    Args:
        index: The group.
        places: Where each parameter stands in its group.
        names: The name of each parameter, or None.
        params: The parameters as the optimizer holds them, whole or sharded.
        grad_dtype: The dtype of their gradients.
        clips: What their group says under "clip": whether norm rules look at them.
        norm_group: The name of those with which they share one norm, where it is not all.
    """

    def __init__(
        self,
        index: int,
        places: Sequence[int],
        names: Sequence[str | None],
        params: Sequence[Tensor],
        grad_dtype: torch.dtype,
        clips: bool = True,
        norm_group: str | None = None,
    ) -> None:
        self.clips, self.norm_group = clips, norm_group
        self.index, self.places, self.names = index, list(places), list(names)
        self.originals, self.plain = list(params), all_plain(params)
        self.layouts: list[Layout | None] = list(map(layout_of, params))
        self.sharded, self._placed = any(self.layouts), list(map(placements, params))
        rows = zip(params, self.layouts, strict=True)
        self._known = self.plain or all([layout or all_plain([p]) for p, layout in rows])
        self.device, self.dtype, self.grad_dtype = params[0].device, params[0].dtype, grad_dtype
        self.state_dtype = state_dtype(params[0])
        self.shapes = [p.shape for p in params]
        self.sizes = [p.numel() for p in params]  # entries on other ranks count
        self.key = (index, self.device, self.dtype)
        self.checked: set[str] = set()  # the state that is known to have these shapes
        self._kinds: dict[str, list[StateNames]] = {}
        self._keys: dict[tuple[int, ...], Tensor] = {}
        self._elements: Elements | None = None

    def keys(self, *numbers: int) -> Tensor:
        """A whole number for each parameter, a hash of its place and of some numbers."""
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
        """The numbers of each parameter that are kept from step to step, and never change."""
        starts = [self._elements.starts] if self._elements else []
        return [*self._keys.values(), *starts]

    def same(self, group: Mapping[str, Any], grads: Grads) -> bool:
        """Whether the group has the same parameters here, in the form and kind that they had."""
        named = group.get("param_names") or [None] * len(group["params"])
        params, grads, names = map(self.of, (group["params"], grads, named))
        return (
            self._known
            and self.names == names
            and (self.plain or self._placed == list(map(placements, params)))
            and all(map(operator.is_, params, self.originals))
            and all(map(operator.eq, map(SHAPE, params), self.shapes))
            and all(map(operator.eq, map(SHAPE, grads), self.shapes))
            and set(map(DTYPE, params)) == {self.dtype}
            and set(map(DTYPE, grads)) == {self.grad_dtype}
            and set(map(LAYOUT, grads)) == {torch.strided}
            and set(map(DEVICE, params)) == {self.device}
        )

    def check_shapes(self, key: str, row: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        """Raise before memory is touched where a parameter has another shape than its state."""
        if same_shapes(row, self.originals):
            self.checked.add(key)  # until the shape of a parameter changes
            return
        rows = zip(self.places, self.originals, row, strict=True)
        place, p, t = next(one for one in rows if one[1].shape != one[2].shape)
        raise ValueError(
            f"{label(self.index, group, place)} has shape {tuple(p.shape)} now, but its state "
            f"{key!r} has shape {tuple(t.shape)}: if you change the shape of a parameter, delete "
            "optimizer.state[p], or make a new optimizer"
        )

    def kinds(self, link: str, names: Callable[[Tensor], dict[str, bool]]) -> list[StateNames]:
        """What `names` gives for parameters at this link, and the parameters for which it does."""
        if link not in self._kinds:
            each = list(map(names, self.originals))
            kinds = [frozenset(mine.items()) for mine in each]
            self._kinds[link] = [(each[some[0]], some) for some in batches(kinds)]
        return self._kinds[link]

    def select(self, where: Sequence[int]) -> Cohort:
        """The cohort of some of the parameters."""
        places, names = [self.places[i] for i in where], [self.names[i] for i in where]
        params = [self.originals[i] for i in where]
        kind = self.grad_dtype, self.clips, self.norm_group
        return Cohort(self.index, places, names, params, *kind)

    def of(self, row: Grads) -> Sequence[Any]:
        """Of the values for every parameter of the group those of these."""
        if isinstance(row, dict) or len(row) != len(self.places):
            return [row[i] for i in self.places]
        return row


class Roster:
    """The cohorts of the groups, and values made of them once, while the parameters stay.

    Args:
        reads_tags: Whether a parameter's `grad_norm_group` gives it a norm group. Functions that
            clip as torch does read no tags, because torch takes one norm of all gradients.
    """

    def __init__(self, reads_tags: bool = True) -> None:
        self._reads_tags = reads_tags
        self._known: dict[int, tuple[Any, list[Cohort]]] = {}
        self._made: dict[Hashable, Any] = {}

    def of(
        self, groups: Sequence[Mapping[str, Any]], given: Sequence[Grads]
    ) -> list[tuple[Cohort, Sequence[Any]]]:
        """The parameters that have a gradient, in cohorts of a group, and their gradients."""
        if len(self._known) > len(groups):
            self._known = {g: known for g, known in self._known.items() if g < len(groups)}
            self._made.clear()
        return [
            (cohort, cohort.of(grads))
            for index, (group, grads) in enumerate(zip(groups, given, strict=True))
            for cohort in self.cohorts(index, group, grads)
        ]

    def cohorts(self, index: int, group: Mapping[str, Any], grads: Grads) -> list[Cohort]:
        """The cohorts of a group's parameters that have a gradient."""
        rows = grads.items() if isinstance(grads, dict) else enumerate(grads)
        where = [i for i, grad in rows if grad is not None]
        tags = [getattr(p, TAG, None) for p in group["params"]] if self._reads_tags else None
        asked = where, group.get("clip"), group.get("norm_group"), tags
        if torch.compiler.is_compiling():
            return _divided(index, group, grads, where, tags)
        known, cohorts = self._known.get(index, (None, []))
        if known != asked or not all([cohort.same(group, grads) for cohort in cohorts]):
            cohorts = _divided(index, group, grads, where, tags)
            self._known[index] = asked, cohorts
            self._made.clear()
        return cohorts

    @property
    def vectors(self) -> list[Tensor]:
        """What cohorts and divisions hold from step to step, and nobody writes."""
        cohorts = [cohort for _, cohorts in self._known.values() for cohort in cohorts]
        every = [*cohorts, *self._made.values()]
        return [t for x in every for t in getattr(x, "vectors", ())]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value that was made under this key, which names the cohorts that it is of."""
        if torch.compiler.is_compiling():  # its graph holds for all steps
            return make()
        if key not in self._made:
            if len(self._made) >= MOST:
                self._made.clear()
            self._made[key] = make()
        return self._made[key]


def _divided(
    index: int,
    group: Mapping[str, Any],
    grads: Grads,
    where: Sequence[int],
    tags: Sequence[str | None] | None,
) -> list[Cohort]:
    """The parameters that have a gradient, by their device, the dtypes and the norm they share.

    `tags` are the norm groups that the parameters name themselves, unless nobody reads them.
    """
    params = group["params"]
    names = group.get("param_names") or [None] * len(params)
    _check_grads(index, group, grads, where)
    clips, joint = group.get("clip", True), group.get("norm_group")
    named = [joint] * len(params) if tags is None else [tag or joint for tag in tags]
    kinds = [(params[i].device, params[i].dtype, grads[i].dtype, named[i]) for i in where]
    cohorts = []
    for some in batches(kinds):
        places, (*_, dtype, norm_group) = [where[k] for k in some], kinds[some[0]]
        rows = [names[i] for i in places], [params[i] for i in places]
        cohorts.append(Cohort(index, places, *rows, dtype, clips, norm_group))
    return cohorts


def _check_grads(index: int, group: Mapping[str, Any], grads: Grads, where: Sequence[int]) -> None:
    """Raise a sentence for a sparse gradient, or one of another shape than its parameter."""
    params = group["params"]
    sparse = [i for i in where if grads[i].layout is not torch.strided]
    if sparse:
        i = sparse[0]
        raise TypeError(
            f"sparse gradients are not supported, got one of shape {tuple(params[i].shape)} for "
            f"{label(index, group, i)}: make the layer with sparse=False, or give it a separate "
            "optimizer without transforms, such as torch.optim.SparseAdam"
        )
    if not same_shapes([grads[i] for i in where], [params[i] for i in where]):
        i = next(i for i in where if grads[i].shape != params[i].shape)
        raise ValueError(
            f"{label(index, group, i)}: got a gradient of shape {tuple(grads[i].shape)} for a "
            f"parameter of {tuple(params[i].shape)}: set the gradient to None when you change the "
            "shape of a parameter"
        )


def label(index: int, group: Mapping[str, Any], place: int) -> str:
    """The name of a parameter in errors."""
    names = group.get("param_names")
    name = f" ({names[place]})" if names else ""
    return f"parameter {place} of group {index}{name}"
