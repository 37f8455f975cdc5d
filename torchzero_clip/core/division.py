"""Division: the division of tensors into units, which a norm rule measures together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.cohort import Cohort
from torchzero_clip.core.norms.shards import Gathering, gatherings
from torchzero_clip.core.norms.slices import SliceRows, rows_of
from torchzero_clip.core.stacks import batches
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensor_kinds import all_here
from torchzero_clip.core.torch_private import fake_mode

UNITS = "units"
"""The identity of the units of vectors, in a record with names of its own."""


class Division:
    """The units of some cohorts: a unit is a tensor, a slice of one, a layer, a group, or all.

    Args:
        cohorts: The cohorts, by group.
        scope: The kind of unit: None each tensor, "layer", "group", "global", else slices.
        dims: The dims that the slices of a tensor run along, where units are slices.
        name: The name of the rule in errors.
        named: The norm that each group shares, where some do not share that of all.
    """

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        scope: Any,
        dims: Callable[[Tensor], tuple[int, ...]] | None,
        name: str,
        named: Sequence[str | None] = (),
    ) -> None:
        self.cohorts, self.scope, self.name = cohorts, scope, name
        self.home = cohorts[0].device
        double = torch.float64 in [statistic_dtype(cohort.originals[0]) for cohort in cohorts]
        self.dtype = torch.float64 if double else torch.float32
        self.indexes = sorted({cohort.index for cohort in cohorts})  # the groups
        self.layouts = [layout for cohort in cohorts for layout in cohort.layouts]
        self.sharded = any(self.layouts)
        self.complex = any([cohort.dtype.is_complex for cohort in cohorts])
        ends = [sum([len(cohort.places) for cohort in cohorts[:i]]) for i in range(len(cohorts))]
        self.starts = dict(zip(cohorts, ends, strict=True))  # of a cohort's tensors among all
        groups = [self.indexes.index(cohort.index) for cohort in cohorts for _ in cohort.places]
        self.dims: list[Any] = [None] * len(groups)  # of each tensor those along its slices
        self.lengths: list[int] | None = None  # how many units each tensor is, where it is several
        self.layers: dict[str, int] = {}
        self.norm_groups: list[str | None] = [None]  # of each unit, where the scope is all
        self.named = named
        self.rows: dict[Cohort, SliceRows] = {}  # the slices
        self._known: dict[Hashable, Tensor] = {}
        self.vectors: list[Tensor] = []  # those, which are kept from step to step
        self._order: Any = "unknown"  # of the units, until somebody asks
        self._gathered: list[Gathering] = []  # on the meshes of shards
        if scope is None or isinstance(scope, str):
            self._join(groups)
        else:
            assert dims is not None
            self._cut(groups, dims)

    def _join(self, groups: list[int]) -> None:
        """Number the units of whole tensors."""
        self.unit_of = {
            "global": self._norm_groups,
            "group": lambda: groups,
            "layer": self._layers,
        }.get(self.scope, lambda: list(range(len(groups))))()
        members = batches(self.unit_of)  # units are numbered in the order in which they come
        self.count = len(members)
        self.first_group = [groups[row[0]] for row in members]  # of each unit
        self.shared = len(self.indexes) > 1 and self.scope in ("layer", "global")
        numel = [n for cohort in self.cohorts for n in cohort.sizes]
        self.sizes = [sum([numel[i] for i in row]) for row in members]
        self.width = max(map(len, members))  # tensors of the largest unit
        self.columns = [i for row in members for i in row + [-1] * (self.width - len(row))]
        self.entries = [0 if i < 0 else numel[i] for i in self.columns]
        of_all = [self._position(name) for name in self.norm_groups]
        joint = {"group": [self.indexes[g] for g in self.first_group], "global": of_all}
        self.positions = joint.get(self.scope)  # the group of each unit that may be in many ranks

    def _norm_groups(self) -> list[int]:
        """The unit of each tensor where the scope is all: one, unless some have their own norm."""
        names = [x.norm_group if self.named else None for x in self.cohorts for _ in x.places]
        self.norm_groups = list(dict.fromkeys(names))
        return [self.norm_groups.index(name) for name in names]

    def _position(self, name: str | None) -> int:
        """The first group that shares this norm, which is the same on all ranks."""
        return self.named.index(name) if name in self.named else len(self.named)

    def _layers(self) -> list[int]:
        """The layer of each tensor, by the order in which layers come."""
        names = [name for cohort in self.cohorts for name in cohort.names]
        if None in names:
            raise ValueError(
                f"{self.name}: dim='layer' needs the names of the parameters: pass "
                "model.named_parameters() to the optimizer"
            )
        layers = [layer_of(name) for name in names if name is not None]
        return [self.layers.setdefault(layer, len(self.layers)) for layer in layers]

    def _cut(self, groups: list[int], dims_of: Callable[[Tensor], tuple[int, ...]]) -> None:
        """Number the slices; a tensor without the dims is one unit, of no size."""
        tensors = [p for cohort in self.cohorts for p in cohort.originals]
        self.dims = [dims_of(t) for t in tensors]
        self.slices = [
            [1 if d in along or not along else n for d, n in enumerate(t.shape)]
            for t, along in zip(tensors, self.dims, strict=True)
        ]
        self.lengths = [math.prod(shape) for shape in self.slices]
        self.count, self.shared, self.first_group = sum(self.lengths), False, groups
        self.sizes = [  # of a slice of each tensor
            math.prod([t.shape[d] for d in along if t.dim()]) if along else -1
            for t, along in zip(tensors, self.dims, strict=True)
        ]
        for cohort, start in self.starts.items():
            each = slice(start, start + len(cohort.places))
            self.rows[cohort] = rows_of(cohort.originals, self.slices[each], self.dims[each])

    # ------------------------------------------------------------------ vectors of known values

    def smaller_than(self, size: int) -> Tensor | None:
        """A flag a unit where some are smaller, as tensors without the dims are; otherwise None."""
        if size <= 1 and self.lengths is None:  # the norm of nothing is zero, which stays too
            return None
        small = [n < size or n < 0 for n in self.sizes]
        return self.flags(small) if any(small) else None

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """One vector from one a group: a unit in several groups has the entry of the first."""
        out = vectors[0]
        for g in range(1, len(vectors)):
            mask = self.flags([first == g for first in self.first_group])
            out = torch.where(mask.view(-1, *[1] * (out.dim() - 1)), vectors[g], out)
        return out

    def flags(self, values: Sequence[bool]) -> Tensor:
        """A vector of known truths, one a unit or, where units are slices, one a tensor."""
        return self.constant(values) > 0

    def constant(self, values: Sequence[float]) -> Tensor:
        """A vector of known numbers, one a unit or, where units are slices, one a tensor.

        It is made once, and nobody writes it.
        """
        key = tuple(values)
        if key not in self._known:
            made = norms.numbers(list(map(float, values)), self.home)
            if self.lengths is not None:
                rows = zip(made.unbind(), self.lengths, strict=True)
                made = torch.cat([x.expand(n) for x, n in rows])
            passing = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
            if passing or not all_here([made]):  # as in a step that is written down
                return made
            self._known[key] = made
            self.vectors.append(made)
        return self._known[key]

    def gathered(self, like: Tensor) -> list[Gathering]:
        """How the statistics of shards are gathered, planned once, on the device of a tensor."""
        if not self._gathered:
            self._gathered = gatherings(self.layouts, self.dims, like.device, fake_mode(like))
            plans = [x.plan for x in self._gathered if x.plan is not None]
            self.vectors += [t for plan in plans for t in (plan.columns, plan.entries)]
        return self._gathered

    # ------------------------------------------------------------------ who the units are

    def order(self, groups: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """The units in the order of the parameters: see `UnitIds.order`."""
        if self._order == "unknown":
            self._order = self.ids(groups).order
        return self._order

    def ids(self, groups: Sequence[Mapping[str, Any]]) -> UnitIds:
        """The identity of the units, in these groups."""
        if self.scope == "global" and self.norm_groups != [None]:
            labels = [name or "all others" for name in self.norm_groups]
            named = enumerate(zip(self.first_group, labels, strict=True), 1)
            return UnitIds(tuple([(self.indexes[g], (-i,), (label,)) for i, (g, label) in named]))
        if self.scope in ("group", "global"):
            rows = tuple([(g, (-1,), (f"group {g}",)) for g in self.indexes])
            return UnitIds(rows, one_norm=self.scope == "global")
        if self.scope == "layer":
            first: dict[str, tuple[int, int]] = {}
            for g, group in enumerate(groups):
                for place, name in enumerate(group["param_names"]):
                    first.setdefault(layer_of(name), (g, place))
            return UnitIds(tuple([(first[x][0], (first[x][1],), (x,)) for x in self.layers]))
        tensors = tuple([(x.index, tuple(x.places), tuple(x.names)) for x in self.cohorts])
        return UnitIds(tensors, None if self.lengths is None else tuple(self.lengths))


class UnitIds(NamedTuple):
    """The identity of the units of one step: the same entry of two steps may belong to others.

    `rows` are the index of a group, places in it and the names there; `lengths` is how many slices
    each tensor has, where the units are slices; `one_norm`: the units are groups that share a norm.
    """

    rows: tuple[tuple[int, tuple[int, ...], tuple[str | None, ...]], ...]
    lengths: tuple[int, ...] | None = None
    one_norm: bool = False

    @property
    def order(self) -> list[int] | None:
        """The entries in the order of the parameters; None if they are in that order already.

        Parameters of other dtypes, or with norm groups of their own, are measured apart.
        """
        places = [(g, place) for g, places, _ in self.rows for place in places]
        by_place = sorted(range(len(places)), key=places.__getitem__)
        if by_place == list(range(len(places))) or any([place < 0 for _, place in places]):
            return None
        counts = self.lengths or (1,) * len(places)
        starts = [0, *itertools.accumulate(counts)]
        return [i for t in by_place for i in range(starts[t], starts[t + 1])]

    def in_order(self) -> UnitIds:
        """Return the identity of the same units in the order of the parameters."""
        if self.order is None:
            return self
        counts = self.lengths or (1,) * sum([len(places) for _, places, _ in self.rows])
        each = [
            (g, place, name)
            for g, places, names in self.rows
            for place, name in zip(places, names, strict=True)
        ]
        rows = sorted(zip(each, counts, strict=True), key=lambda row: row[0][:2])
        lengths = None if self.lengths is None else tuple([n for _, n in rows])
        return UnitIds(tuple([(g, (place,), (name,)) for (g, place, name), _ in rows]), lengths)

    def names(self) -> dict[tuple[int, int, int], str]:
        """The name of each unit, under (group, place, slice), by which units are sorted."""
        flat = [
            (g, place, f"parameter {place} of group {g}" if name is None else name)
            for g, places, names in self.rows
            for place, name in zip(places, names, strict=True)
        ]
        if self.lengths is None:
            return {(g, place, -1): name for g, place, name in flat}
        rows = zip(flat, self.lengths, strict=True)
        return {(g, place, i): f"{name}[{i}]" for (g, place, name), n in rows for i in range(n)}


def layer_of(name: str) -> str:
    """The module that a parameter belongs to: all of its name before the last dot."""
    return name.rpartition(".")[0]


class UnitRecord(NamedTuple):
    """What a rule leaves for `metrics()`: vectors, those of limits and ratios for every group."""

    norm: Tensor
    limits: Sequence[Tensor | float]
    ratios: Sequence[Tensor]
    division: Division
    groups: Sequence[Mapping[str, Any]]
