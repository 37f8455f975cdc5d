"""A division: how the tensors of some cohorts are divided into units.

A unit is a set of elements that share one norm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.cohort import Cohort
from torchzero_clip.core.logical_matrices import Grid
from torchzero_clip.core.norms.shards import Gathering, gatherings
from torchzero_clip.core.norms.slices import SliceRows, rows_of
from torchzero_clip.core.stacks import batches
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensor_kinds import all_here
from torchzero_clip.core.torch_private import fake_mode

UNITS = "units"
"""The key of the `UnitIds` in the record of a rule that stores vectors under its own names."""
UnitRow: TypeAlias = "tuple[int, int, str | None]"
"""The index of a group, the place of a parameter in this group, and a name."""


class Division:
    """The units of some cohorts: tensors, slices of tensors, layers, groups, or the whole model.

    Args:
        cohorts: The cohorts, in the order of their groups.
        scope: The kind of unit: None for tensors, "layer", "group" or "global". Anything else means
            slices.
        dims: A function that returns the dims along which the slices of a tensor run. The function
            is only used if units are slices.
        name: The name of the rule in errors.
        named: The norm group of each parameter group, or None. Empty if there are no norm groups.
        grids: A function that returns the slices of a parameter for the norms of matrices, or None
            if `dims` decides.
    """

    def __init__(
        self,
        cohorts: Sequence[Cohort],
        scope: Any,
        dims: Callable[[Tensor], tuple[int, ...]] | None,
        name: str,
        named: Sequence[str | None] = (),
        grids: Callable[[str, Tensor], Grid | None] | None = None,
    ) -> None:
        self.cohorts = cohorts
        self.scope = scope
        self.name = name
        self.home = cohorts[0].device
        double = torch.float64 in [statistic_dtype(cohort.originals[0]) for cohort in cohorts]
        self.dtype = torch.float64 if double else torch.float32
        self.indexes = sorted({cohort.index for cohort in cohorts})  # of the parameter groups
        self.layouts = [layout for cohort in cohorts for layout in cohort.layouts]
        self.sharded = any(self.layouts)
        self.complex = any([cohort.dtype.is_complex for cohort in cohorts])
        self.starts: dict[Cohort, int] = {}  # the index of the first tensor of each cohort
        tensor_count = 0
        for cohort in cohorts:
            self.starts[cohort] = tensor_count
            tensor_count += len(cohort.places)
        groups = [self.indexes.index(cohort.index) for cohort in cohorts for _ in cohort.places]
        self.dims: list[Any] = [None] * len(groups)  # for each tensor, the dims of its slices
        self.grids: list[Grid | None] = [None] * len(groups)  # for each tensor
        self.matrix_grids: list[Grid] = []  # for a rule about matrices
        self.has_finer = False  # whether a row or matrix has several slices
        self.has_fused = False  # whether a parameter has several matrices
        self.has_split = False  # whether a dim of a parameter is split
        self.is_scattered = False  # whether rows or matrices may be scattered in memory
        self.lengths: list[int] | None = None  # the number of slices of each tensor
        self.layers: dict[str, int] = {}  # the unit of each layer
        self.norm_groups: list[str | None] = [None]  # of each unit, if the scope is "global"
        self.named = named
        self.rows: dict[Cohort, SliceRows] = {}  # the slices of each cohort
        self._constants: dict[Hashable, Tensor] = {}
        self.vectors: list[Tensor] = []  # all tensors that are kept from step to step
        self._ids: UnitIds | None = None
        self._gathered: list[Gathering] | None = None  # one for each mesh
        if scope is None or isinstance(scope, str):
            self._join(groups)
        else:
            assert dims is not None
            self._cut(groups, dims, grids)

    def _join(self, groups: list[int]) -> None:
        """Divide the tensors into units that consist of whole tensors.

        Args:
            groups: The group of each tensor, as an index into `indexes`.
        """
        # Groups and norm groups may have parameters on other ranks. So every rank gives such a unit
        # the same number.
        self.positions: list[int] | None = None
        if self.scope == "global":  # each norm group is a unit
            names = [x.norm_group if self.named else None for x in self.cohorts for _ in x.places]
            self.norm_groups = list(dict.fromkeys(names))
            self.unit_of = [self.norm_groups.index(name) for name in names]
            self.positions = [[*self.named, name].index(name) for name in self.norm_groups]
        elif self.scope == "group":
            self.unit_of = groups
            self.positions = self.indexes
        elif self.scope == "layer":
            self.unit_of = self._units_of_layers()
        else:
            self.unit_of = list(range(len(groups)))
        members = batches(self.unit_of)  # units are numbered in the order of their first tensors
        self.count = len(members)
        self.first_group = [groups[tensors[0]] for tensors in members]  # of each unit
        self.shared = len(self.indexes) > 1 and self.scope in ("layer", "global")
        numel = [n for cohort in self.cohorts for n in cohort.sizes]
        self.sizes = [sum([numel[i] for i in tensors]) for tensors in members]
        # a table with a row for each unit: the index of each tensor, filled up with -1
        self.width = max(map(len, members))
        self.columns: list[int] = []
        for tensors in members:
            self.columns += tensors
            self.columns += [-1] * (self.width - len(tensors))
        self.entries = [0 if i < 0 else numel[i] for i in self.columns]

    def _units_of_layers(self) -> list[int]:
        """Return the unit of each tensor if units are layers."""
        names = [name for cohort in self.cohorts for name in cohort.names]
        if None in names:
            raise ValueError(
                f"{self.name}: dim='layer' needs the names of the parameters: pass "
                "model.named_parameters() to the optimizer"
            )
        layers = [layer_of(name) for name in names if name is not None]
        return [self.layers.setdefault(layer, len(self.layers)) for layer in layers]

    def _cut(
        self,
        groups: list[int],
        dims_of: Callable[[Tensor], tuple[int, ...]],
        grids: Callable[[str, Tensor], Grid | None] | None,
    ) -> None:
        """Divide the tensors into slices. A tensor that lacks the dims is one unit."""
        tensors = [p for cohort in self.cohorts for p in cohort.originals]
        names = [name for cohort in self.cohorts for name in cohort.names]
        views: list[Sequence[int]] = []
        for i, (name, t) in enumerate(zip(names, tensors, strict=True)):
            found = None if grids is None else grids(name or "", t)
            self.grids[i] = found
            self.dims[i] = dims_of(t) if found is None else found.dims
            views.append(t.shape if found is None else found.view)
            layout = self.layouts[i]
            if layout is not None:
                self.layouts[i] = replace(layout, shape=tuple(views[i]))
        self.matrix_grids = [found for found in self.grids if found is not None]
        self.has_finer = any([found.is_finer for found in self.matrix_grids])
        self.has_fused = any([len(found.source.sizes) != 1 for found in self.matrix_grids])
        self.has_split = any([found.is_split for found in self.matrix_grids])
        scattered = any([found.is_fused for found in self.matrix_grids])
        has_columns = any([found.has_columns for found in self.matrix_grids])
        self.is_scattered = scattered and not has_columns
        self.slices = [
            [1 if d in along or not along else n for d, n in enumerate(view)]
            for view, along in zip(views, self.dims, strict=True)
        ]
        self.lengths = [math.prod(shape) for shape in self.slices]
        self.count = sum(self.lengths)
        self.shared = False
        self.first_group = groups
        self.sizes = [  # for each tensor, the size of its slices, or -1 if it lacks the dims
            math.prod([view[d] for d in along if view]) if along else -1
            for view, along in zip(views, self.dims, strict=True)
        ]
        for cohort, start in self.starts.items():
            own = slice(start, start + len(cohort.places))
            rows = rows_of(views[own], self.slices[own], self.dims[own], self.has_split)
            if scattered and has_columns:
                rows = rows._replace(whole=False)  # as the columns of separate parameters
            self.rows[cohort] = rows

    def viewed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return one tensor per parameter, with dims split so that slices run along whole dims."""
        pairs = zip(tensors, self.grids, strict=True)
        return [t if found is None else found.viewed(t) for t, found in pairs]

    # ------------------------------------------------------------------ vectors of known values

    def smaller_than(self, size: int) -> Tensor | None:
        """Return a flag for each unit: whether the unit has fewer than `size` elements.

        Return None if no unit has fewer elements.
        A tensor that lacks the dims of slices counts as smaller.
        """
        if size <= 1 and self.lengths is None:  # only empty units are smaller, and their norm is 0
            return None
        small = [n < size or n < 0 for n in self.sizes]
        return self.flags(small) if any(small) else None

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """Join one vector per group into one vector. A unit uses the vector of its first group."""
        joined = vectors[0]
        for g in range(1, len(vectors)):
            mask = self.flags([first == g for first in self.first_group])
            trailing = [1] * (joined.dim() - 1)
            joined = torch.where(mask.view(-1, *trailing), vectors[g], joined)
        return joined

    def flags(self, values: Sequence[bool]) -> Tensor:
        """Return a vector of known flags: see `constant`."""
        return self.constant(values) > 0

    def constant(self, values: Sequence[float]) -> Tensor:
        """Return a vector of known numbers with an element for each unit.

        The division keeps the vector for later steps, so do not change the vector.

        Args:
            values: A number for each unit. If units are slices, a number for each tensor.
        """
        key = tuple(values)
        if key not in self._constants:
            vector = norms.numbers(list(map(float, values)), self.home)
            if self.lengths is not None:
                pairs = zip(vector.unbind(), self.lengths, strict=True)
                vector = torch.cat([x.expand(n) for x, n in pairs])
            if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
                return vector  # only this graph, or only inference mode, may use it
            if not all_here([vector]):  # a recorded step computes on fake tensors
                return vector
            self._constants[key] = vector
            self.vectors.append(vector)
        return self._constants[key]

    def gathered(self, like: Tensor) -> list[Gathering]:
        """Return the plans for gathering the statistics of shards, with tensors on `like.device`.

        The division makes the plans once.
        """
        if self._gathered is None:
            self._gathered = gatherings(self.layouts, self.dims, like.device, fake_mode(like))
            for gathering in self._gathered:
                self.vectors += [gathering.plan.columns, gathering.plan.entries]
        return self._gathered

    # ------------------------------------------------------------------ who the units are

    def ids(self, groups: Sequence[Mapping[str, Any]]) -> UnitIds:
        """Return the identity of the units in these groups. It is computed once."""
        if self._ids is None:
            lengths = None if self.lengths is None else tuple(self.lengths)
            one_norm = self.scope == "global" and self.norm_groups == [None]
            self._ids = UnitIds(tuple(self._id_rows(groups)), lengths, one_norm)
        return self._ids

    def _id_rows(self, groups: Sequence[Mapping[str, Any]]) -> list[UnitRow]:
        """Return the rows of `UnitIds`."""
        if self.scope == "global" and self.norm_groups != [None]:
            numbered = enumerate(zip(self.first_group, self.norm_groups, strict=True), 1)
            return [(self.indexes[g], -i, name or "all others") for i, (g, name) in numbered]
        if self.scope in ("group", "global"):
            names = _names_of_groups(groups)
            return [(g, -1, names[g]) for g in self.indexes]
        if self.scope == "layer":
            first: dict[str, UnitRow] = {}
            for g, group in enumerate(groups):
                for place, name in enumerate(group["param_names"]):
                    layer = layer_of(name)
                    first.setdefault(layer, (g, place, layer))
            return [first[layer] for layer in self.layers]
        return [
            (cohort.index, place, name)
            for cohort in self.cohorts
            for place, name in zip(cohort.places, cohort.names, strict=True)
        ]


@dataclass(frozen=True)
class UnitIds:
    """The identity of the units of one step.

    Vectors of two steps may belong to different units, because a parameter without a gradient has
    no unit.

    Attributes:
        rows: For each unit, or for each tensor with slices: the index of a group, the place of a
            parameter in this group, and a name. The place is negative if the unit is a group.
        lengths: The number of slices of each tensor, if units are slices.
        one_norm: Whether the units are groups that share one norm.
    """

    rows: tuple[UnitRow, ...]
    lengths: tuple[int, ...] | None = None
    one_norm: bool = False

    @cached_property
    def _by_place(self) -> list[int]:
        """The indices of the rows in the order of the parameters."""
        return sorted(range(len(self.rows)), key=lambda i: self.rows[i][:2])

    @cached_property
    def order(self) -> list[int] | None:
        """The indices of the units in the order of the parameters, or None if all are in order.

        The order differs if a group has parameters of several dtypes or norm groups, because each
        cohort is measured separately.
        """
        count = len(self.rows)
        if self._by_place == list(range(count)) or any([place < 0 for _, place, _ in self.rows]):
            return None
        starts = [0, *itertools.accumulate(self.lengths or (1,) * count)]
        return [i for t in self._by_place for i in range(starts[t], starts[t + 1])]

    def in_order(self) -> UnitIds:
        """Return the identity of the same units in the order of the parameters."""
        if self.order is None:
            return self
        rows = tuple([self.rows[i] for i in self._by_place])
        lengths = None if self.lengths is None else tuple([self.lengths[i] for i in self._by_place])
        return UnitIds(rows, lengths)

    def names(self) -> dict[tuple[int, int, int], str]:
        """Return the name of each unit, by (group, place, slice). Units are sorted by this key."""
        named = [
            (g, place, f"parameter {place} of group {g}" if name is None else name)
            for g, place, name in self.rows
        ]
        if self.lengths is None:
            return {(g, place, -1): name for g, place, name in named}
        pairs = zip(named, self.lengths, strict=True)
        return {(g, place, i): f"{name}[{i}]" for (g, place, name), n in pairs for i in range(n)}


def _names_of_groups(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the "name" of each group, or its index if it has no name that differs from others."""
    given = [group.get("name") for group in groups]
    names: list[str] = []
    for g, name in enumerate(given):
        if isinstance(name, str) and given.count(name) == 1:
            names.append(name)
        else:
            names.append(f"group {g}")
    return names


def layer_of(name: str) -> str:
    """Return the module of a parameter: its name up to the last dot."""
    return name.rpartition(".")[0]


class UnitRecord(NamedTuple):
    """The vectors that a rule stores for `metrics()`.

    Attributes:
        norm: The norm of each unit.
        limits: For each group, the largest norm that each unit may have.
        ratios: For each group, the divisor of each unit.
        division: The units.
        groups: The groups.
    """

    norm: Tensor
    limits: Sequence[Tensor | float]
    ratios: Sequence[Tensor]
    division: Division
    groups: Sequence[Mapping[str, Any]]
