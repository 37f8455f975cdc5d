"""Units: which tensors a norm rule measures together, and what is kept for each such unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket, Group, statistic, statistic_dtype
from torchzero_clip.core.tensorlist import TensorList, wide

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
        params = [bucket.params.tensors[0] for bucket in self.buckets]
        self.home = params[0].device
        dtypes = [statistic_dtype(p) for p in params]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.stats: Tensor | None = None
        indexes = sorted({bucket.index for bucket in self.buckets})
        self.groups = [[b for b in self.buckets if b.index == index] for index in indexes]
        scope = rule.scope
        self.sliced = not (scope is None or isinstance(scope, str))
        self.numel = [t.numel() for bucket in self.buckets for t in bucket.params]
        if self.sliced:
            self._cut()
        else:
            self._join(scope)

    # ------------------------------------------------------------------ the partition

    def _join(self, scope: Any) -> None:
        """Number the units of whole tensors."""
        seen: dict[Any, int] = {}
        self.owner: list[int] = []  # of each unit: the group that came first
        self.unit_of: list[int] = []  # of each tensor
        for g, members in enumerate(self.groups):
            for bucket in members:
                for name in bucket.names:
                    key = self._key(scope, bucket, name, len(self.unit_of))
                    if key not in seen:
                        seen[key] = len(seen)
                        self.owner.append(g)
                    self.unit_of.append(seen[key])
        self.count = len(seen)
        self.members: list[list[int]] = [[] for _ in range(self.count)]
        for i, unit in enumerate(self.unit_of):
            self.members[unit].append(i)
        self.sizes = [sum([self.numel[i] for i in row]) for row in self.members]
        self.shared = len(self.groups) > 1 and scope in ("layer", "global")

    def _key(self, scope: Any, bucket: Bucket, name: str | None, place: int) -> Any:
        if scope != "layer":
            return {None: place, "group": bucket.index, "global": 0}[scope]
        if name is None:
            raise ValueError(
                f"{type(self.rule).__name__}: dim='layer' needs to know the names of the "
                "parameters: pass model.named_parameters() to the optimizer"
            )
        return name.rpartition(".")[0]

    def _cut(self) -> None:
        """Number the slices; a tensor without the dims is one unit, of no size."""
        tensors = [t for bucket in self.buckets for t in bucket.params]
        self.dims = [self.rule.dims(t) for t in tensors]
        self.shapes = [
            [1 if d in dims or not dims else n for d, n in enumerate(t.shape)]
            for t, dims in zip(tensors, self.dims, strict=True)
        ]
        self.lengths = [math.prod(shape) for shape in self.shapes]
        self.count, self.shared = sum(self.lengths), False
        self.sizes, self.owner = [], []
        owners = [g for g, members in enumerate(self.groups) for b in members for _ in b.params]
        for t, dims, many, g in zip(tensors, self.dims, self.lengths, owners, strict=True):
            self.sizes += [math.prod([t.shape[d] for d in dims]) if dims else -1] * many
            self.owner += [g] * many

    # ------------------------------------------------------------------ vectors

    def measure(self, lists: Sequence[TensorList]) -> Tensor:
        """The norm of every unit of these tensors, a list for each bucket."""
        if self.sliced:
            tensors = [t for some in lists for t in some]
            rows = zip(tensors, self.dims, strict=True)
            parts = [norms.slice_norms(t, dims, self.order) for t, dims in rows]
            return torch.cat([part.reshape(-1).to(self.home) for part in parts])
        stats = self._statistics(lists)
        if self.stats is None:  # what is measured first is what gets scaled
            self.stats = stats
        return self._combine(stats)

    def mean(self, lists: Sequence[TensorList]) -> Tensor:
        """The mean of every unit, complex where some tensor is."""
        tensors = [t for some in lists for t in some]
        if self.sliced:
            rows = zip(tensors, self.dims, strict=True)
            parts = [norms.slice_mean(t, dims) for t, dims in rows]
            return torch.cat([part.reshape(-1).to(self.home) for part in parts])
        totals = torch.cat([norms.totals(some.tensors).to(self.home) for some in lists], dim=1)
        mean = self._table(totals).sum(dim=2) / norms.numbers(
            [max(n, 1) for n in self.sizes], totals
        )
        complex_ = any([t.is_complex() for t in tensors])
        return torch.complex(mean[0], mean[1]) if complex_ else mean[0]

    def total(self, lists: Sequence[TensorList]) -> Tensor:
        """The norm of all tensors together: of what was measured first, where that is known."""
        stats = self._statistics(lists) if self.stats is None else self.stats
        return norms.combine(stats.unsqueeze(1), [self.numel], self.order)[0]

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
        return self._combine(norms.scaled(self.stats, torch.stack(rows), self.order))

    def ratio(self, norm: Tensor, limit: Tensor) -> Tensor:
        """norm / limit in terms of the tensors: var grows with their square."""
        ratio = norm / limit
        return ratio.sqrt() if self.order.degree == 2 else ratio

    def known(self, norm: Tensor) -> Tensor:
        """Which units have a norm that is a number, in the precision that state is kept in."""
        return torch.isfinite(norm.to(self.dtype))

    def smaller_than(self, size: int) -> Tensor:
        """Which units have fewer elements; never those of no slices, which stay as they are."""
        return flags([n < size or n < 0 for n in self.sizes], self.home)

    def by_owner(self, vectors: Sequence[Tensor]) -> Tensor:
        """For each unit the entry of the vector of the first group that has a part in it."""
        return by_owner(vectors, self.owner)

    def spread(self, bucket: Bucket, vector: Tensor) -> Tensor | list[Tensor]:
        """A vector as an operand for a bucket: one tensor for all, or one for each."""
        param = bucket.params.tensors[0]
        if not param.is_complex() and vector.is_complex():
            vector = vector.real
        dtype = bucket.state_dtype if vector.is_complex() else statistic_dtype(param)
        vector = vector.to(param.device, torch.bool if vector.dtype == torch.bool else dtype)
        start = self._start(bucket)
        here = range(start, start + len(bucket.params))
        if self.sliced:
            parts = vector.split(self.lengths)
            return [parts[i].view(self.shapes[i]) for i in here]
        if self.count == 1:
            return vector[0]
        entries = vector.unbind(0)
        return [entries[self.unit_of[i]] for i in here]

    def per_tensor(self, bucket: Bucket, vector: Tensor) -> list[Tensor]:
        """A vector as one 0-dim tensor for each tensor of a bucket."""
        each = self.spread(bucket, vector)
        return [each] * len(bucket.params) if isinstance(each, Tensor) else each

    def group(self, members: Sequence[Bucket]) -> Group:
        """A group as a rule sees it: tensors are those of all units, measurable at this scope."""
        group = members[0].group
        for name in ("params", "grads"):
            lists: list[TensorList] = [getattr(bucket, name) for bucket in self.buckets]
            group[name] = TensorList([t for some in lists for t in some])
            group[name].norms = lambda lists=lists: self.measure(lists)
        group["total"] = lambda: self.total([bucket.u for bucket in self.buckets])
        return group

    def record(self, norm: Tensor, limits: Sequence[Tensor], ratios: Sequence[Tensor]) -> None:
        """Leave what was measured for `metrics()`: for each unit, or for each group of one unit."""
        first, one = self.buckets[0], self.shared and self.count == 1
        first.record[first.bound.path] = (norm, limits, ratios, [] if one else self.owner)

    def _statistics(self, lists: Sequence[TensorList]) -> Tensor:
        stats = [norms.statistics(some.tensors, self.order).to(self.home) for some in lists]
        return torch.cat(stats, dim=1)

    def _combine(self, stats: Tensor) -> Tensor:
        width = max([len(row) for row in self.members])
        counts = [[self.numel[i] for i in row] + [0] * (width - len(row)) for row in self.members]
        return norms.combine(self._table(stats), counts, self.order)

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
        joined = {
            key: torch.stack([cell.to(self.home) for cell in cells])
            for key, cells in self.cells.items()
        }
        return {
            key: v.to(wide(v.device)) if v.is_floating_point() else v for key, v in joined.items()
        }

    def store(self, state: UnitState) -> None:
        """Write vectors back where the units' values are kept."""
        for key, value in state.items():
            torch._foreach_copy_(self.cells[key], list(value.unbind(0)))

    def _cells(self, key: str, value: Any) -> list[Tensor]:
        """The tensor that holds one value of each unit; where several share it, the same one.

        A tensor's or a layer's is in the state of its parameters, a group's in its chain dict, a
        global one in the chain dict of every group.
        """
        places: list[list[tuple[dict[str, Any], Tensor]]] = [[] for _ in range(self.count)]
        i, scope = 0, self.rule.scope
        for bucket in self.buckets:
            chain = bucket.groups[0]["chain"] if scope == "global" else bucket.shared
            for param, own in zip(bucket.params, bucket.memory, strict=True):
                memory = chain if scope in ("group", "global") else own
                places[self.unit_of[i]].append((memory, param))
                i += 1
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


def by_owner(vectors: Sequence[Tensor], owner: Sequence[int]) -> Tensor:
    """Of each entry the value in the vector of its owner."""
    out = vectors[0]
    for g in range(1, len(vectors)):
        mask = flags([own == g for own in owner], out.device)
        out = torch.where(mask.view(-1, *[1] * (out.dim() - 1)), vectors[g], out)
    return out


def flags(values: Sequence[bool], device: torch.device) -> Tensor:
    """A vector of known truths on a device."""
    if not any(values):
        return torch.zeros(len(values), dtype=torch.bool, device=device)
    like = torch.empty(0, dtype=torch.float32, device=device)
    return norms.numbers([float(value) for value in values], like) > 0
