"""Units: which tensors a norm rule measures together, and what is kept for each such unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket, Group, statistic, statistic_dtype
from torchzero_clip.core.norms.shards import gather, merge_shards
from torchzero_clip.core.tape import Recorded
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import separate, whole_of, wide

if TYPE_CHECKING:
    from torchzero_clip.core.norm_rule import NormRule, UnitState


class Units:
    """The partition of the tensors of some buckets: vectors have one entry a unit.

    A unit is a tensor, a slice of one, a layer, a group, or all tensors. Values of one parameter
    group are vectors over all units too; a tensor takes the entry of its unit.
    """

    def __init__(self, rule: NormRule, buckets: Sequence[Bucket]) -> None:
        self.rule, self.buckets = rule, sorted(buckets, key=lambda bucket: bucket.index)
        self.order = norms.measure(rule.ord)
        params = [bucket.params.peek[0] for bucket in self.buckets]
        self.home = params[0].device
        dtypes = [statistic_dtype(p) for p in params]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.stats: Tensor | None = None
        indexes = sorted({bucket.index for bucket in self.buckets})
        self.groups = [[b for b in self.buckets if b.index == index] for index in indexes]
        scope = rule.scope
        self.sliced = not (scope is None or isinstance(scope, str))
        self.layouts = [layout for bucket in self.buckets for layout in bucket.layouts]
        self.numel = [n for bucket in self.buckets for n in bucket.sizes]
        self.lengths: list[int] | None = None  # how many units each tensor is, where it is several
        self.dims: list[tuple[int, ...] | None] = [None] * len(self.numel)
        if self.sliced:
            self._cut()
        else:
            self._join(scope)

    # ------------------------------------------------------------------ the partition

    def _join(self, scope: Any) -> None:
        """Number the units of whole tensors."""
        groups = [g for g, members in enumerate(self.groups) for b in members for _ in b.params]
        if scope is None:
            self.unit_of = list(range(len(groups)))  # of each tensor
        elif scope == "global":
            self.unit_of = [0] * len(groups)
        elif scope == "group":
            self.unit_of = groups
        else:
            seen: dict[str, int] = {}
            layers = [self._layer(name) for bucket in self.buckets for name in bucket.names]
            self.unit_of = [seen.setdefault(layer, len(seen)) for layer in layers]
        self.count = max(self.unit_of) + 1
        self.members: list[list[int]] = [[] for _ in range(self.count)]
        for i, unit in enumerate(self.unit_of):
            self.members[unit].append(i)
        self.owner = [groups[row[0]] for row in self.members]  # the group that came first
        self.shared = len(self.groups) > 1 and scope in ("layer", "global")

    def _layer(self, name: str | None) -> str:
        if name is None:
            raise ValueError(
                f"{type(self.rule).__name__}: dim='layer' needs to know the names of the "
                "parameters: pass model.named_parameters() to the optimizer"
            )
        return name.rpartition(".")[0]

    def _cut(self) -> None:
        """Number the slices; a tensor without the dims is one unit, of no size."""
        tensors = [t for bucket in self.buckets for t in bucket.params]
        shapes = [
            tuple(t.shape) if layout is None else layout.shape
            for t, layout in zip(tensors, self.layouts, strict=True)
        ]
        dims = [self.rule.dims(t) for t in tensors]
        self.dims = [*dims]
        self.slices = [
            [1 if d in along or not along else n for d, n in enumerate(shape)]
            for shape, along in zip(shapes, dims, strict=True)
        ]
        self.lengths = [math.prod(shape) for shape in self.slices]
        self.count, self.shared = sum(self.lengths), False
        self.owner = [g for g, members in enumerate(self.groups) for b in members for _ in b.params]
        rows = zip(shapes, dims, strict=True)
        self._sizes = [math.prod([s[d] for d in along]) if along else -1 for s, along in rows]

    @property
    def sizes(self) -> list[int]:
        """How many entries each unit has; each slice, a number a tensor."""
        if self.lengths is not None:
            return self._sizes
        return [sum([self.numel[i] for i in row]) for row in self.members]

    # ------------------------------------------------------------------ vectors

    def measure(self, lists: Sequence[TensorList]) -> Tensor:
        """The norm of every unit of these tensors, a list for each bucket."""
        stats = self._statistics(lists, self.order)
        if self.stats is None:  # what is measured first is what gets scaled
            self.stats = stats
        return self._norms(stats, self.order)

    def mean(self, lists: Sequence[TensorList]) -> Tensor:
        """The mean of every unit, complex where some tensor is."""
        sums = self._statistics(lists, norms.NAMED["sum"])
        sizes: Tensor | None = None
        if self.lengths is None:
            sums, sizes = self._joined(sums, norms.NAMED["sum"])
        mean = sums / (self._entries(sums) if sizes is None else sizes).clamp(min=1)
        complex_ = any([t.is_complex() for some in lists for t in some.peek])
        return torch.complex(mean[0], mean[1]) if complex_ else mean[0]

    def total(self, lists: Sequence[TensorList]) -> Tensor:
        """The norm of all tensors together: of what was measured first, where that is known."""
        stats = self.stats
        if stats is None or self.sliced:
            stats = statistics_of(self.buckets, lists, self.order)
        return overall(self.buckets, stats, self.numel, self.order)

    def after(self, norm: Tensor, ratios: Sequence[Tensor]) -> Tensor:
        """The norms of the units once the tensors of each group are divided by its ratios."""
        if not self.shared:
            return norm / self.by_owner(ratios) ** self.order.degree
        assert self.stats is not None
        rows = [
            each.to(self.home, norm.dtype)
            for members, ratio in zip(self.groups, ratios, strict=True)
            for bucket in members
            for each in self.per_tensor(bucket, ratio)
        ]
        return self._norms(norms.scaled(self.stats, torch.stack(rows), self.order), self.order)

    def ratio(self, norm: Tensor, limit: Tensor) -> Tensor:
        """norm / limit in terms of the tensors: var grows with their square."""
        ratio = norm / limit
        return ratio.sqrt() if self.order.degree == 2 else ratio

    def known(self, norm: Tensor) -> Tensor:
        """Which units have a norm that is a number, in the precision that state is kept in."""
        return torch.isfinite(norm.to(self.dtype))

    def smaller_than(self, size: int) -> Tensor:
        """Which units have fewer elements; never those of no slices, which stay as they are."""
        if size <= 1 and self.lengths is None:  # the norm of nothing is zero, which stays too
            return flags([False] * self.count, self.home)
        return flags([n < size or n < 0 for n in self.sizes], self.home, self.lengths)

    def by_owner(self, vectors: Sequence[Tensor]) -> Tensor:
        """For each unit the entry of the vector of the first group that has a part in it."""
        return by_owner(vectors, self.owner, self.lengths)

    def spread(self, bucket: Bucket, vector: Tensor) -> Tensor | list[Tensor]:
        """A vector as an operand for a bucket: one number for all, one a tensor, or slices."""
        param = bucket.params.peek[0]
        if not param.is_complex() and vector.is_complex():
            vector = vector.real
        dtype = bucket.state_dtype if vector.is_complex() else statistic_dtype(param)
        vector = vector.to(param.device, torch.bool if vector.dtype == torch.bool else dtype)
        start = self._start(bucket)
        here = range(start, start + len(bucket.params))
        if self.lengths is not None:
            parts = vector.split(self.lengths)
            slices = [parts[i].view(self.slices[i]) for i in here]
            rows = zip(slices, bucket.layouts, strict=True)
            return [part if layout is None else layout.part(part) for part, layout in rows]
        units = self.unit_of[start : start + len(bucket.params)]
        if self.rule.scope in ("group", "global"):
            return vector[units[0]]
        if units == list(here):
            return vector[start : start + len(bucket.params)]
        entries = vector.unbind(0)
        return [entries[unit] for unit in units]

    def listed(self, bucket: Bucket, vector: Tensor) -> list[float]:
        """A vector on CPU as one number for each tensor of a bucket, in the bucket's precision."""
        values: list[float] = vector.to(statistic_dtype(bucket.params.peek[0])).tolist()
        start = self._start(bucket)
        return [values[unit] for unit in self.unit_of[start : start + len(bucket.params)]]

    def per_tensor(self, bucket: Bucket, vector: Tensor) -> TensorList:
        """A vector as one 0-dim tensor for each tensor of a bucket."""
        each = self.spread(bucket, vector)
        if isinstance(each, Tensor):
            each = [each] * len(bucket.params) if each.dim() == 0 else list(each.unbind())
        return TensorList(each)

    def group(self, members: Sequence[Bucket]) -> Group:
        """A group as a rule sees it: tensors are those of all units, measurable at this scope."""
        group = members[0].group
        for name in ("params", "grads"):
            lists: list[TensorList] = [getattr(bucket, name) for bucket in self.buckets]
            group[name] = TensorList([t for some in lists for t in some.peek])
            group[name].norms = lambda lists=lists: self.measure(lists)
        group["total"] = lambda: self.total([bucket.u for bucket in self.buckets])
        return group

    def record(self, norm: Tensor, limits: Sequence[Tensor], ratios: Sequence[Tensor]) -> None:
        """Leave what was measured for `metrics()`: for each unit, or for each group of one unit."""
        first, one = self.buckets[0], self.shared and self.count == 1
        pick = None if one else partial(by_owner, owner=self.owner, lengths=self.lengths)
        first.record[first.bound.path] = (norm, limits, ratios, pick)

    def _statistics(self, lists: Sequence[TensorList], m: norms.Measure) -> Tensor:
        """A column for each tensor, or for each slice."""
        if self.lengths is None:
            return statistics_of(self.buckets, lists, m)
        rows = zip([t for some in lists for t in some.peek], self.dims, strict=True)
        parts = [norms.slice_statistics(t, dims or (), m).to(self.home) for t, dims in rows]
        lengths = [part.shape[1] for part in parts]
        return merge_shards(torch.cat(parts, dim=1), lengths, self.layouts, self.dims, m)

    def _norms(self, stats: Tensor, m: norms.Measure) -> Tensor:
        if self.lengths is not None:
            return norms.finish(stats, self._entries(stats) if m.counts else None, m)
        return norms.finish(*self._joined(stats, m), m)

    def _joined(self, stats: Tensor, m: norms.Measure) -> tuple[Tensor, Tensor | None]:
        """The statistics of tensors as those of units, and how many entries these have."""
        grouped = self.rule.scope == "group"
        places = [self.groups[g][0].index if grouped else 0 for g in self.owner]
        apart = self.rule.scope not in ("group", "global")
        first, numel = self.buckets[0], self.numel
        return join(self._table(stats), self.members, numel, m, first, None if apart else places)

    def _entries(self, like: Tensor) -> Tensor:
        """How many entries each slice has."""
        assert self.lengths is not None
        rows = zip(self.sizes, self.lengths, strict=True)
        return torch.cat([torch.full_like(like[0, :1], size).expand(n) for size, n in rows])

    def _table(self, stats: Tensor) -> Tensor:
        """Columns of tensors as a (rows, units, tensors) table, short units filled with zeros."""
        width = max([len(row) for row in self.members])
        if width == 1 or self.count == 1:
            return stats.view(len(stats), self.count, width)
        columns = [*stats.unbind(1), torch.zeros_like(stats[:, 0])]
        order = [i for row in self.members for i in row + [-1] * (width - len(row))]
        return torch.stack([columns[i] for i in order], 1).view(len(stats), self.count, width)

    def _start(self, bucket: Bucket) -> int:
        """Where a bucket's tensors begin among all."""
        before = self.buckets[: self.buckets.index(bucket)]
        return sum([len(other.params) for other in before])

    # ------------------------------------------------------------------ state

    def load(self) -> UnitState:
        """The state of the units: for each key of `init_unit` its values, stacked, in float64."""
        made, path = self.rule.init_unit(), self.buckets[0].bound.path
        self.cells = {key: self._cells(f"{path}/{key}", value) for key, value in made.items()}
        self.bases = {key: whole_of(cells) for key, cells in self.cells.items()}
        joined: dict[str, Tensor] = {}
        for key, cells in self.cells.items():
            base = self.bases[key]
            if base is None:
                joined[key] = torch.stack([cell.to(self.home) for cell in cells])
            else:
                joined[key] = base.to(self.home, copy=True)
        return {
            key: v.to(wide(v.device)) if v.is_floating_point() else v for key, v in joined.items()
        }

    def store(self, state: UnitState) -> None:
        """Write vectors back where the units' values are kept."""
        for key, value in state.items():
            base = self.bases[key]
            if base is not None:
                base.copy_(value)
            else:
                torch._foreach_copy_(self.cells[key], list(value.unbind(0)))

    def _cells(self, key: str, value: Any) -> list[Tensor]:
        """The tensor that holds one value of each unit: those of tensors share one memory."""
        devices = {bucket.params.peek[0].device for bucket in self.buckets}
        if self.rule.scope is not None or len(devices) > 1:
            return self._gather_cells(key, value)
        memories = [memory for bucket in self.buckets for memory in bucket.memory]
        held = [memory.get(key) for memory in memories]
        there = [cell for cell in held if isinstance(cell, Tensor)]
        if len(there) == len(held) and there[0].device == self.home and whole_of(there) is not None:
            return there
        cells = self._gather_cells(key, value)
        if separate(cells):
            cells = list(torch.stack(cells).unbind())
            for memory, cell in zip(memories, cells, strict=True):
                memory[key] = cell
        return cells

    def _gather_cells(self, key: str, value: Any) -> list[Tensor]:
        """The tensor of each unit, made where it is missing; where several share it, the same one.

        A tensor's or a layer's is in the state of its parameters, a group's in its chain dict, a
        global one in the chain dict of every group.
        """
        places: list[list[tuple[dict[str, Any], Tensor]]] = [[] for _ in range(self.count)]
        start, scope = 0, self.rule.scope
        for bucket in self.buckets:
            rows = list(zip(bucket.memory, bucket.params.peek, strict=True))
            if scope in ("group", "global"):  # all of a bucket are in one unit
                chain = bucket.groups[0]["chain"] if scope == "global" else bucket.shared
                rows = [(chain, bucket.params.peek[0])]
            for unit, row in zip(self.unit_of[start:], rows, strict=False):
                places[unit].append(row)
            start += len(bucket.params)
        cells: list[Tensor] = []
        for rows in places:
            memory, param = next((row for row in rows if key in row[0]), rows[0])
            held = memory.get(key, value)
            if key not in memory or not isinstance(held, Tensor) or held.device != param.device:
                copied = held.clone() if isinstance(held, Tensor) else held
                memory[key] = statistic(copied, param, self._dtype_of(rows))
            cells.append(memory[key])
            for other, _ in rows:
                if other.get(key) is not memory[key]:
                    other[key] = memory[key]
        if self.rule.scope == "global":
            for group in self.buckets[0].groups:
                if group["chain"].get(key) is not cells[0]:
                    group["chain"][key] = cells[0]
        return cells

    def _dtype_of(self, rows: Sequence[tuple[dict[str, Any], Tensor]]) -> torch.dtype:
        """The dtype of a unit's numbers: that of its widest parameter."""
        wide_one = any([statistic_dtype(param) == torch.float64 for _, param in rows])
        return torch.float64 if wide_one else torch.float32


def by_owner(
    vectors: Sequence[Tensor], owner: Sequence[int], lengths: Sequence[int] | None
) -> Tensor:
    """Of each entry the value in the vector of its owner."""
    out = vectors[0]
    for g in range(1, len(vectors)):
        mask = flags([own == g for own in owner], out.device, lengths)
        out = torch.where(mask.view(-1, *[1] * (out.dim() - 1)), vectors[g], out)
    return out


def flags(
    values: Sequence[bool], device: torch.device, lengths: Sequence[int] | None = None
) -> Tensor:
    """A vector of known truths on a device, each as often as `lengths` says."""
    if lengths is not None:
        rows = zip(values, lengths, strict=True)
        return torch.cat([torch.full((n,), v, device=device) for v, n in rows])
    if not any(values):
        return torch.zeros(len(values), dtype=torch.bool, device=device)
    like = torch.empty(0, dtype=torch.float32, device=device)
    return norms.numbers([float(value) for value in values], like) > 0


# ---------------------------------------------------------------------- whole tensors of buckets


def statistics_of(
    buckets: Sequence[Bucket], lists: Sequence[TensorList], m: norms.Measure
) -> Tensor:
    """The statistic of every tensor, a column each; sharded ones are those of all their shards."""
    home = buckets[0].params.peek[0].device
    stats = torch.cat([_statistics(some, m).to(home) for some in lists], dim=1)
    layouts = [layout for bucket in buckets for layout in bucket.layouts]
    if not any(layouts):
        return stats
    return merge_shards(stats, [1] * len(layouts), layouts, [None] * len(layouts), m)


def _statistics(some: TensorList, m: norms.Measure) -> Tensor:
    return some.statistics(m) if isinstance(some, Recorded) else norms.statistics(some.peek, m)


def total_norm(buckets: Sequence[Bucket], lists: Sequence[TensorList]) -> Tensor:
    """The 2-norm of all tensors together, as torch.nn.utils.clip_grad_norm_ returns it."""
    numel = [n for bucket in buckets for n in bucket.sizes]
    m = norms.NAMED["l2"]
    return overall(buckets, statistics_of(buckets, lists, m), numel, m)


def overall(
    buckets: Sequence[Bucket], stats: Tensor, numel: Sequence[int], m: norms.Measure
) -> Tensor:
    """One norm from the statistics of all tensors."""
    rows = [list(range(len(numel)))]
    return norms.finish(*join(stats.unsqueeze(1), rows, numel, m, buckets[0], [0]), m)[0]


def join(
    table: Tensor,
    members: Sequence[Sequence[int]],
    numel: Sequence[int],
    m: norms.Measure,
    bucket: Bucket,
    places: Sequence[int] | None,
) -> tuple[Tensor, Tensor | None]:
    """Statistics of units from a (rows, units, tensors) table, and where needed their sizes.

    With a process group, units that go on in its other processes are those of all; `places` says
    which they are.
    """
    group = None if places is None else bucket.process_group
    if not (m.counts or m.kind == "sum" or group is not None):
        return norms.merge(table, None, m), None
    width = table.shape[2]
    flat = [n for row in members for n in [numel[i] for i in row] + [0] * (width - len(row))]
    counts = norms.numbers(flat, table).view(-1, width)
    stats, sizes = norms.merge(table, counts, m), counts.sum(dim=1)
    if places is None or group is None:
        return stats, sizes
    return _across(stats, sizes, m, bucket, places)


def _across(
    stats: Tensor, sizes: Tensor, m: norms.Measure, bucket: Bucket, places: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The same of the units of all processes of the bucket's process group."""
    mine = dict(zip(places, torch.cat([stats, sizes.unsqueeze(0)]).unbind(1), strict=True))
    none = torch.zeros(len(stats) + 1, dtype=stats.dtype, device=stats.device)
    columns = [mine.get(i, none) for i in range(max(len(bucket.groups), 1))]
    every = gather(torch.stack(columns, dim=1), bucket.process_group).permute(1, 2, 0)
    here = torch.stack([every[:, i] for i in places], dim=1)
    return norms.merge(here[:-1], here[-1], m), here[-1].sum(dim=1)
