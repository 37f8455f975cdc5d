"""Units: the tensors that a norm rule measures together, and the verbs to work on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.combine import join, overall, statistics_of
from torchzero_clip.core.engine import Group
from torchzero_clip.core.norms.shards import merge_shards
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.unit_ids import ids_of, layer_of
from torchzero_clip.core.unit_state import UnitState, UnitStore
from torchzero_clip.core.unit_vectors import Joined, flags, of_first_group


class Units:
    """The partition of the tensors of some buckets: vectors have one entry a unit.

    A unit is a tensor, a slice of one, a layer, a group, or all tensors. Values of one parameter
    group are vectors over all units too; a tensor takes the entry of its unit.

    Args:
        buckets: The buckets of a step.
        scope: The kind of unit: None each tensor, "layer", "group", "global", else slices.
        measure: The norm order, as a Measure.
        dims: The dims that the slices of a tensor run along, where units are slices.
        name: The name of the rule in errors.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        scope: Any,
        measure: norms.Measure,
        dims: Callable[[Tensor], tuple[int, ...]] | None = None,
        name: str = "Units",
    ) -> None:
        self.buckets = sorted(buckets, key=lambda bucket: bucket.index)
        self.scope, self.order, self.name = scope, measure, name
        self.home = self.buckets[0].device
        params = [bucket.originals[0] for bucket in self.buckets]
        double = torch.float64 in [statistic_dtype(p) for p in params]
        self.dtype = torch.float64 if double else torch.float32
        indexes = sorted({bucket.index for bucket in self.buckets})
        self.groups = [[b for b in self.buckets if b.index == index] for index in indexes]
        self.sliced = not (scope is None or isinstance(scope, str))
        self.layouts = [layout for bucket in self.buckets for layout in bucket.layouts]
        self.numel = [n for bucket in self.buckets for n in bucket.sizes]
        self.first_group = [g for g, row in enumerate(self.groups) for b in row for _ in b.places]
        self._stats: Tensor | None = None  # of the update, once it is measured
        self.lengths: list[int] | None = None  # how many units each tensor is, where it is several
        self.layers: dict[str, int] = {}
        if self.sliced:
            assert dims is not None
            self._cut(dims)
        else:
            self._join()

    # ------------------------------------------------------------------ the partition

    def _join(self) -> None:
        """Number the units of whole tensors."""
        if self.scope is None:
            self.unit_of = list(range(len(self.first_group)))  # of each tensor
        elif self.scope == "global":
            self.unit_of = [0] * len(self.first_group)
        elif self.scope == "group":
            self.unit_of = self.first_group
        else:
            layers = [self._layer(name) for bucket in self.buckets for name in bucket.names]
            self.unit_of = [self.layers.setdefault(x, len(self.layers)) for x in layers]
        self.count = max(self.unit_of) + 1
        self.members: list[list[int]] = [[] for _ in range(self.count)]
        for i, unit in enumerate(self.unit_of):
            self.members[unit].append(i)
        self.first_group = [self.first_group[row[0]] for row in self.members]  # of each unit
        self.shared = len(self.groups) > 1 and self.scope in ("layer", "global")

    def _layer(self, name: str | None) -> str:
        if name is None:
            raise ValueError(
                f"{self.name}: dim='layer' needs to know the names of the parameters: pass "
                "model.named_parameters() to the optimizer"
            )
        return layer_of(name)

    def _cut(self, dims_of: Callable[[Tensor], tuple[int, ...]]) -> None:
        """Number the slices; a tensor without the dims is one unit, of no size."""
        tensors = [p for bucket in self.buckets for p in bucket.originals]
        self.dims = [dims_of(t) for t in tensors]
        self.slices = [
            [1 if d in along or not along else n for d, n in enumerate(t.shape)]
            for t, along in zip(tensors, self.dims, strict=True)
        ]
        self.lengths = [math.prod(shape) for shape in self.slices]
        self.count, self.shared = sum(self.lengths), False
        rows = zip(tensors, self.dims, strict=True)
        self._sizes = [
            math.prod([t.shape[d] for d in along if t.dim()]) if along else -1 for t, along in rows
        ]

    @property
    def sizes(self) -> list[int]:
        """The number of entries of each unit; of slices one number for each tensor."""
        if self.lengths is not None:
            return self._sizes
        return [sum([self.numel[i] for i in row]) for row in self.members]

    # ------------------------------------------------------------------ what is measured

    def norm(self, name: str | None = None) -> Tensor:
        """The norm of every unit of the update, or of the state with this name."""
        if name is None:
            return self._finish(self._flowing(), self.order)
        return self._norms_of([bucket.state[name] for bucket in self.buckets])

    def mean(self) -> Tensor:
        """The mean of every unit of the update, complex where some tensor is."""
        m = norms.NAMED["sum"]
        sums = self._statistics([bucket.u for bucket in self.buckets], m)
        if self.lengths is None:
            sums, sizes = self._joined(sums, m)
        else:
            sizes = self._entries(sums)
        assert sizes is not None
        mean = sums / sizes.clamp(min=1)
        complex_ = any([bucket.dtype.is_complex for bucket in self.buckets])
        return torch.complex(mean[0], mean[1]) if complex_ else mean[0]

    def total(self) -> Tensor:
        """The norm of the whole update, as one."""
        stats = None if self.sliced else self._flowing()
        if stats is None:
            flowing = [bucket.u for bucket in self.buckets]
            stats = statistics_of(self.buckets, flowing, self.order)
        return overall(self.buckets, stats, self.numel, self.order)

    def measure(self, tensors: TensorList) -> Tensor:
        """The norm of every unit of a list with a tensor for each parameter."""
        if isinstance(tensors, Joined) and tensors.pending:
            return self._norms_of(tensors.lists)
        counts = [len(bucket.places) for bucket in self.buckets]
        if len(tensors) != sum(counts):
            raise ValueError(
                f"{self.name}.measure takes lists with a tensor for each of the {sum(counts)} "
                f"parameters that the rule sees, got {len(tensors)}"
            )
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        rows = zip(ends, counts, strict=True)
        return self._norms_of([TensorList(tensors.tensors[end - n : end]) for end, n in rows])

    def after(self, norm: Tensor, ratios: Sequence[Tensor]) -> Tensor:
        """The norms of the units once the tensors of each group are divided by its ratios."""
        if not self.shared:
            return norm / self.of_first_group(ratios) ** self.order.degree
        rows = [
            each.to(self.home, norm.dtype)
            for members, ratio in zip(self.groups, ratios, strict=True)
            for bucket in members
            for each in self.as_list(bucket, ratio)
        ]
        return self._finish(
            norms.scaled(self._flowing(), torch.stack(rows), self.order), self.order
        )

    def finite(self, norm: Tensor) -> Tensor:
        """A flag a unit: whether its norm is a number, in the precision of state."""
        return torch.isfinite(norm.to(self.dtype))

    def smaller_than(self, size: int) -> Tensor:
        """A flag a unit: whether it has fewer elements, as a tensor without the dims has."""
        if size <= 1 and self.lengths is None:  # the norm of nothing is zero, which stays too
            return flags([False] * self.count, self.home)
        return flags([n < size or n < 0 for n in self.sizes], self.home, self.lengths)

    def ratio(self, norm: Tensor, limit: Tensor) -> Tensor:
        """norm / limit in terms of the tensors: var grows with their square."""
        ratio = norm / limit
        return ratio.sqrt() if self.order.degree == 2 else ratio

    # ------------------------------------------------------------------ values of groups

    def each(self, live: str) -> list[Any]:
        """The live value with this name, of every group."""
        return [members[0].group[live] for members in self.groups]

    def group(self, members: Sequence[Bucket]) -> Group:
        """The group that a rule sees; "params" and "grads" are those of all units, measurable."""
        group = members[0].group
        for name in ("params", "grads"):
            group[name] = Joined([getattr(bucket, name) for bucket in self.buckets], self.measure)
        group["total"] = self.total
        return group

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """One vector from one a group: a unit in several groups has the entry of the first."""
        return of_first_group(vectors, self.first_group, self.lengths)

    # ------------------------------------------------------------------ verbs

    def divide(self, bucket: Bucket, u: TensorList, ratio: Tensor) -> TensorList:
        """u over the ratio of its units; where all are 1, u itself."""
        factors = norms.divisions(ratio, bucket.state_dtype)
        operands = [(name, self.operand(bucket, x)) for name, x in factors]
        return bucket.session.scale(u, operands, norms.all_ones(ratio))

    def lerp_(self, name: str, weights: Sequence[Tensor], where: Tensor) -> None:
        """m ← m + weight · (u - m) for the state m with this name, in units where a flag is set.

        The weights are those of every group.
        """
        for members, weight in zip(self.groups, weights, strict=True):
            for bucket in members:
                m = bucket.state[name]
                u = bucket.u.to(bucket.state_dtype).where(self.as_list(bucket, where), m)
                m.lerp_(u, self.as_list(bucket, weight))

    def div_(self, name: str, ratio: Tensor) -> None:
        """m ← m / ratio, m the state with this name."""
        for bucket in self.buckets:
            factors = [("div", self.operand(bucket, ratio))]
            bucket.session.scale(bucket.state[name], factors, norms.all_ones(ratio))

    def load(self, made: dict[str, Any]) -> UnitState:
        """The state of the units: for each name of `made` its values, stacked, in float64."""
        self._store = UnitStore(self.buckets, self.scope, self.unit_of, self.layers)
        return self._store.load(made)

    def store(self, state: UnitState) -> None:
        """Write vectors back where the units' values are kept."""
        self._store.store(state)

    def record(self, norm: Tensor, limits: Sequence[Tensor], ratios: Sequence[Tensor]) -> None:
        """Leave norms, limits and ratios for `metrics()`, with the units that they are of."""
        first, one = self.buckets[0], self.shared and self.scope == "global"
        pick = partial(of_first_group, first_group=self.first_group, lengths=self.lengths)
        ids = ids_of(self.buckets, self.scope, self.lengths)
        first.step.record[first.bound.path] = (norm, limits, ratios, None if one else pick, ids)

    # ------------------------------------------------------------------ vectors as operands

    def operand(self, bucket: Bucket, vector: Tensor) -> Tensor | list[Tensor]:
        """A vector as an operand for a bucket: one number for all, one a tensor, or slices."""
        param = bucket.originals[0]
        if not bucket.dtype.is_complex and vector.is_complex():
            vector = vector.real
        dtype = bucket.state_dtype if vector.is_complex() else statistic_dtype(param)
        vector = vector.to(bucket.device, torch.bool if vector.dtype == torch.bool else dtype)
        start, count = self._start(bucket), len(bucket.places)
        if self.lengths is not None:
            parts = vector.split(self.lengths)
            slices = [parts[i].view(self.slices[i]) for i in range(start, start + count)]
            rows = zip(slices, bucket.layouts, strict=True)
            return [part if layout is None else layout.part(part) for part, layout in rows]
        units = self.unit_of[start : start + count]
        if self.scope in ("group", "global"):
            return vector[units[0]]
        if units == list(range(start, start + count)):
            return vector[start : start + count]
        entries = vector.unbind(0)
        return [entries[unit] for unit in units]

    def as_list(self, bucket: Bucket, vector: Tensor) -> TensorList:
        """A vector as one 0-dim tensor for each tensor of a bucket."""
        each = self.operand(bucket, vector)
        if isinstance(each, Tensor):
            each = [each] * len(bucket.places) if each.dim() == 0 else list(each.unbind())
        return TensorList(each)

    def _start(self, bucket: Bucket) -> int:
        """The index of a bucket's first tensor among the tensors of all buckets."""
        before = self.buckets[: self.buckets.index(bucket)]
        return sum([len(other.places) for other in before])

    # ------------------------------------------------------------------ statistics

    def _flowing(self) -> Tensor:
        """The statistics of the update, measured once."""
        if self._stats is None:
            self._stats = self._statistics([bucket.u for bucket in self.buckets], self.order)
        return self._stats

    def _norms_of(self, lists: Sequence[TensorList]) -> Tensor:
        return self._finish(self._statistics(lists, self.order), self.order)

    def _statistics(self, lists: Sequence[TensorList], m: norms.Measure) -> Tensor:
        """The statistics of lists: a column for each tensor, or for each slice."""
        if self.lengths is None:
            return statistics_of(self.buckets, lists, m)
        rows = zip([t for some in lists for t in some], self.dims, strict=True)
        parts = [norms.slice_statistics(t, dims, m).to(self.home) for t, dims in rows]
        lengths = [part.shape[1] for part in parts]
        return merge_shards(torch.cat(parts, dim=1), lengths, self.layouts, [*self.dims], m)

    def _finish(self, stats: Tensor, m: norms.Measure) -> Tensor:
        if self.lengths is not None:
            return norms.finish(stats, self._entries(stats) if m.counts else None, m)
        return norms.finish(*self._joined(stats, m), m)

    def _joined(self, stats: Tensor, m: norms.Measure) -> tuple[Tensor, Tensor | None]:
        """The statistics of tensors as those of units, and the numbers of their entries."""
        positions = None
        if self.scope in ("group", "global"):
            grouped = self.scope == "group"
            positions = [self.groups[g][0].index if grouped else 0 for g in self.first_group]
        table = self._table(stats)
        return join(table, self.members, self.numel, m, self.buckets[0], positions)

    def _entries(self, like: Tensor) -> Tensor:
        """The number of entries of each slice."""
        assert self.lengths is not None
        rows = zip(self.sizes, self.lengths, strict=True)
        return torch.cat([torch.full_like(like[0, :1], size).expand(n) for size, n in rows])

    def _table(self, stats: Tensor) -> Tensor:
        """The columns as a (rows, units, tensors) table, short units filled with zeros."""
        width = max([len(row) for row in self.members])
        if width == 1 or self.count == 1:
            return stats.view(len(stats), self.count, width)
        columns = [*stats.unbind(1), torch.zeros_like(stats[:, 0])]
        order = [i for row in self.members for i in row + [-1] * (width - len(row))]
        return torch.stack([columns[i] for i in order], 1).view(len(stats), self.count, width)
