"""NormRule: a rule about norms, written once for every scope."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket, Group, statistic, statistic_dtype
from torchzero_clip.core.norms import Ord
from torchzero_clip.core.tensorlist import TensorList, wide
from torchzero_clip.core.transform import Transform

Scope: TypeAlias = 'int | Sequence[int] | Literal["layer", "group", "global"] | None'
UnitState: TypeAlias = dict[str, Tensor]


class NormRule(Transform):
    """Scale every unit (a tensor, its slices, a layer, a group, the model) by min(1, limit / norm).

    Write `limit`, and for a rule with memory `init_unit` and `observe`. All three see vectors, one
    entry a unit, so a rule never loops. Declare `ord`, `dim`, `inverse_dims` or `min_size` as
    fields to make them arguments.
    """

    ord = cast(Ord, 2)
    dim = cast(Scope, None)
    inverse_dims = False
    min_size = 1

    sets_norm: ClassVar[bool] = False
    """Scale by limit / norm, up as well as down."""

    def init_unit(self) -> dict[str, Any]:
        """The state of one unit: numbers or small tensors."""
        return {}

    def limit(self, norm: Tensor, state: UnitState, group: Group) -> Tensor | float:
        """The norm that each unit may have this step, from the past alone."""
        raise NotImplementedError(f"{type(self).__name__} has no limit")

    def observe(self, norm: Tensor, clipped: Tensor, state: UnitState, group: Group) -> UnitState:
        """The state after a step with this norm, which the rule brought to `clipped`."""
        return {}

    def measure(self, tensors: TensorList) -> Tensor:
        """The norms of other tensors at this rule's scope: inside `limit`, of group["params"]."""
        if tensors.norms is None:
            raise ValueError(
                f'{type(self).__name__}.measure takes group["params"] or group["grads"] as `limit` '
                "receives them"
            )
        return tensors.norms()

    def total(self, group: Group) -> Tensor:
        """The norm of everything that this link sees, as one: inside `limit`."""
        total: Tensor = group["total"]()
        return total

    # ------------------------------------------------------------------ what the core does

    @property
    def scope(self) -> Scope:
        """`dim`, or "global" where the rule spells it otherwise."""
        return self.dim

    def dims(self, tensor: Tensor) -> tuple[int, ...]:
        """The dims that the slices of one tensor run along, where the scope is slices."""
        return dims_of(tensor, self.dim, self.inverse_dims)

    def step(self, buckets: list[Bucket]) -> list[Bucket]:
        units = Units(self, buckets)
        norm = units.measure([bucket.u for bucket in units.buckets])
        state = units.load()
        limits = [
            self.limit(units.pick(norm, ids), units.picked(state, ids), units.group(members, ids))
            for ids, members in units.groups
        ]
        ratios = self.scale(units, norm, limits)
        if state:
            self.remember(units, norm, units.after(norm, ratios), state)
        return buckets

    def prepare(self, buckets: list[Bucket]) -> None:
        super().prepare(buckets)
        Units(self, buckets).load()

    def per_parameter(self, param: Tensor) -> dict[str, Any]:
        own = self.scope is None or self.scope == "layer"
        return {**self.init(param), **(self.init_unit() if own else {})}

    def scale(self, units: Units, norm: Tensor, limits: Sequence[Tensor | float]) -> list[Tensor]:
        """Bring every tensor to its group's limit; returns what each group was divided by."""
        ratios: list[Tensor] = []
        for (ids, members), limit in zip(units.groups, limits, strict=True):
            ratio = self._ratio(units, ids, units.pick(norm, ids), limit)
            for bucket in members:
                u = bucket.u.to(bucket.state_dtype)
                bucket.u = u.div_(units.spread(bucket, ids, ratio))
            ratios.append(ratio)
        units.record(norm, limits, ratios)
        return ratios

    def _ratio(self, units: Units, ids: list[int], norm: Tensor, bound: Tensor | float) -> Tensor:
        """What to divide by so that the norm meets the limit."""
        limit = bound if isinstance(bound, Tensor) else torch.full_like(norm, bound)
        ratio = units.ratio(norm, limit)
        ratio = ratio if self.sets_norm else ratio.clamp(min=1)
        untouched = (norm == 0) | (limit == math.inf) | units.too_small(ids, norm)
        return torch.where(untouched, torch.ones_like(ratio), ratio)

    def remember(self, units: Units, norm: Tensor, clipped: Tensor, state: UnitState) -> None:
        """Keep what `observe` says, for the units whose norm is a number."""
        known = units.known(norm) & torch.isfinite(clipped)
        parts: list[UnitState] = []
        for ids, members in units.owners:
            old = units.picked(state, ids)
            group = units.group(members, ids)
            new = self.observe(units.pick(norm, ids), units.pick(clipped, ids), old, group)
            if not new.keys() <= old.keys():
                raise KeyError(
                    f"{type(self).__name__}.observe returned {sorted(new.keys() - old.keys())}, "
                    f"which init_unit does not make; it makes {sorted(old)}"
                )
            parts.append({**old, **new})
        after: UnitState = {}
        for key, old_value in state.items():
            joined = units.in_order([part[key] for part in parts])
            mask = known.view(-1, *[1] * (joined.dim() - 1))
            after[key] = torch.where(mask, joined.to(old_value.dtype), old_value)
        units.store(after)

    def check(self) -> None:
        super().check()
        try:
            norms.measure(self.ord)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: ord {error}") from None
        check_dim(self, self.scope, self.inverse_dims)
        self.require("min_size", at_least=0, integer=True)
        sliced = not (self.scope is None or isinstance(self.scope, str))
        if sliced and (self.init_unit() or type(self).init is not Transform.init):
            raise ValueError(
                f"{type(self).__name__}: dim must be None, 'layer', 'group' or 'global' for a rule "
                f"with memory, got {self.dim!r}"
            )


def check_dim(rule: Transform, dim: Any, inverse_dims: bool) -> None:
    """Raise a sentence unless `dim` and `inverse_dims` make sense."""
    name = type(rule).__name__
    if isinstance(dim, str) and dim not in ("layer", "group", "global"):
        raise ValueError(
            f"{name}: dim must be None, an int, a sequence of ints, 'layer', 'group' or 'global', "
            f"got {dim!r}"
        )
    whole = dim is None or isinstance(dim, str)
    dims = () if whole else (dim if isinstance(dim, (tuple, list)) else (dim,))
    if not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"{name}: dim must be an int or a sequence of ints, got {dim!r}")
    if inverse_dims and whole:
        raise ValueError(f"{name}: inverse_dims=True needs dim to be ints, got dim={dim!r}")


def dims_of(tensor: Tensor, dim: Any, inverse: bool) -> tuple[int, ...]:
    """The dims of one tensor that a slice runs along; dims that the tensor lacks are ignored."""
    n = tensor.dim()
    asked = [dim] if isinstance(dim, int) else list(dim)
    mine = {d % n for d in asked if -n <= d < n}
    return tuple([d for d in range(n) if (d in mine) != inverse])


class Units:
    """The partition of the tensors of some buckets into units, and their state."""

    def __init__(self, rule: NormRule, buckets: Sequence[Bucket]) -> None:
        self.rule, self.buckets = rule, sorted(buckets, key=lambda bucket: bucket.index)
        self.stats: Tensor | None = None
        dtypes = [statistic_dtype(bucket.params.tensors[0]) for bucket in buckets]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.measured_by = norms.measure(rule.ord)
        self.home = buckets[0].params.tensors[0].device
        self.slices: list[tuple[int, ...]] | None = None
        scope = rule.scope
        if scope is None or isinstance(scope, str):
            self._whole(scope)
        else:
            self._slices()
        self.groups = self._groups()
        self.owners = self._owners()

    # ------------------------------------------------------------------ the partition

    def _whole(self, scope: str | None) -> None:
        """Units of whole tensors: number the units, note each tensor's."""
        seen: dict[Any, int] = {}
        self.unit_of: list[list[int]] = []  # by bucket
        for b, bucket in enumerate(self.buckets):
            keys: list[Any] = []
            for i, name in enumerate(bucket.names):
                if scope == "layer":
                    if name is None:
                        raise ValueError(
                            f"{type(self.rule).__name__}: dim='layer' needs to know the names of "
                            "the parameters: pass model.named_parameters() to the optimizer"
                        )
                    keys.append(name.rpartition(".")[0])
                else:
                    keys.append({None: (b, i), "group": bucket.index, "global": 0}[scope])
            self.unit_of.append([seen.setdefault(key, len(seen)) for key in keys])
        self.count = len(seen)
        flat = [unit for row in self.unit_of for unit in row]
        self.numel = [t.numel() for bucket in self.buckets for t in bucket.params.tensors]
        self.members: list[list[int]] = [[] for _ in range(self.count)]
        for i, unit in enumerate(flat):
            self.members[unit].append(i)
        self.sizes = [sum([self.numel[i] for i in row]) for row in self.members]

    def _slices(self) -> None:
        """Units of slices: each tensor has a run of them."""
        start = 0
        self.unit_of, self.sizes, self.slices = [], [], []
        for bucket in self.buckets:
            row: list[int] = []
            for t in bucket.params.tensors:
                dims = self.rule.dims(t)
                size = math.prod([t.shape[d] for d in dims])
                many = math.prod([n for d, n in enumerate(t.shape) if d not in dims]) if dims else 1
                self.slices.append(dims)
                self.sizes += [size if dims else -1] * many
                row.append(start)
                start += many
            self.unit_of.append([*row, start])
        self.count = start

    def _groups(self) -> list[tuple[list[int], list[Bucket]]]:
        """For each parameter group: the units that it has a part in, and its buckets."""
        found: dict[int, tuple[dict[int, None], list[Bucket]]] = {}
        for bucket, units in zip(self.buckets, self.unit_of, strict=True):
            ids, members = found.setdefault(bucket.index, ({}, []))
            ids.update(dict.fromkeys(units if self.slices is None else range(units[0], units[-1])))
            members.append(bucket)
        return [(list(ids), members) for ids, members in found.values()]

    def _owners(self) -> list[tuple[list[int], list[Bucket]]]:
        """For each group: the units that it is the first to have a part in."""
        taken: set[int] = set()
        out: list[tuple[list[int], list[Bucket]]] = []
        for ids, members in self.groups:
            own = [i for i in ids if i not in taken]
            taken.update(own)
            if own:
                out.append((own, members))
        return out

    # ------------------------------------------------------------------ vectors of units

    def measure(self, lists: Sequence[TensorList]) -> Tensor:
        """The norm of every unit of these tensors, one list a bucket."""
        if self.slices is not None:
            dims = iter(self.slices)
            parts = [self._slice_norms(t, next(dims)) for some in lists for t in some.tensors]
            return torch.cat([part.reshape(-1).to(self.home) for part in parts])
        stats = [norms.statistics(some.tensors, self.measured_by).to(self.home) for some in lists]
        joined = torch.cat(stats, dim=1)
        if self.stats is None:  # what is measured first is what gets scaled
            self.stats = joined
        return self._combine(joined)

    def _slice_norms(self, t: Tensor, dims: tuple[int, ...]) -> Tensor:
        if not dims:  # nothing to reduce: untouched, like a norm of zero
            return torch.zeros(1, dtype=wide(t.device), device=t.device)
        return norms.slice_norms(t, dims, self.measured_by)

    def _combine(self, stats: Tensor) -> Tensor:
        """Norms of units from the statistics of tensors."""
        width = max([len(row) for row in self.members])
        counts = [[self.numel[i] for i in row] + [0] * (width - len(row)) for row in self.members]
        return norms.combine(self._table(stats), counts, self.measured_by)

    def _table(self, stats: Tensor) -> Tensor:
        """Columns of tensors as a (rows, units, tensors) table, short units filled with zeros."""
        width = max([len(row) for row in self.members])
        if width == 1 or self.count == 1:
            return stats.view(len(stats), self.count, width)
        columns = [*stats.unbind(1), torch.zeros_like(stats[:, 0])]
        order = [i for row in self.members for i in row + [-1] * (width - len(row))]
        return torch.stack([columns[i] for i in order], 1).view(len(stats), self.count, width)

    def total(self, lists: Sequence[TensorList]) -> Tensor:
        """The norm of all these tensors together, of what was measured first if it can."""
        if self.slices is None and self.stats is not None:
            return norms.combine(self.stats.unsqueeze(1), [self.numel], self.measured_by)[0]
        stats = [norms.statistics(some.tensors, self.measured_by).to(self.home) for some in lists]
        counts = [t.numel() for some in lists for t in some.tensors]
        return norms.combine(torch.cat(stats, 1).unsqueeze(1), [counts], self.measured_by)[0]

    def mean(self, lists: Sequence[TensorList]) -> Tensor:
        """The mean of every unit, complex where some tensor is."""
        tensors = [t for some in lists for t in some.tensors]
        if self.slices is not None:
            pairs = zip(tensors, self.slices, strict=True)
            parts = [norms.slice_mean(t, dims) for t, dims in pairs]
            return torch.cat([part.reshape(-1).to(self.home) for part in parts])
        totals = [norms.totals(some.tensors).to(self.home) for some in lists]
        sums = norms.table_sums(self._table(torch.cat(totals, dim=1)))
        mean = sums / norms.numbers([max(n, 1) for n in self.sizes], sums)
        complex_ = any([t.is_complex() for t in tensors])
        return torch.complex(mean[0], mean[1]) if complex_ else mean[0]

    def ratio(self, norm: Tensor, limit: Tensor) -> Tensor:
        """norm / limit in terms of the tensors: var grows with their square."""
        ratio = norm / limit
        return ratio.sqrt() if self.measured_by.degree == 2 else ratio

    def too_small(self, ids: list[int], like: Tensor, at_least: int = 0) -> Tensor:
        """Which units have fewer elements than min_size."""
        wanted = max(self.rule.min_size, at_least)
        sizes = [self.sizes[i] for i in ids]
        if min(sizes, default=wanted) >= wanted:
            return torch.zeros_like(like, dtype=torch.bool)
        return norms.numbers(sizes, like.abs()) < wanted

    def after(self, norm: Tensor, ratios: Sequence[Tensor]) -> Tensor:
        """The norms of the units after scaling."""
        if sum([len(ids) for ids, _ in self.groups]) == self.count:  # every unit has one group
            return norm / torch.cat(list(ratios)) ** self.measured_by.degree
        assert self.stats is not None
        rows = [
            each.to(self.home, norm.dtype)
            for (ids, members), ratio in zip(self.groups, ratios, strict=True)
            for bucket in members
            for each in self.per_tensor(bucket, ids, ratio)
        ]
        return self._combine(norms.scaled(self.stats, torch.stack(rows), self.measured_by))

    def record(
        self, norm: Tensor, limits: Sequence[Tensor | float], ratios: Sequence[Tensor]
    ) -> None:
        """Leave what was measured for `metrics()`."""
        first = self.buckets[0]
        first.record[first.bound.path] = (norm, [ids for ids, _ in self.groups], limits, ratios)

    def pick(self, vector: Tensor, ids: list[int]) -> Tensor:
        """The entries of some units."""
        first, last = (ids[0], ids[-1] + 1) if ids else (0, 0)
        if ids == list(range(first, last)):
            return vector[first:last]
        parts = vector.unbind(0)
        return torch.stack([parts[i] for i in ids])

    def picked(self, state: UnitState, ids: list[int]) -> UnitState:
        return {key: self.pick(value, ids) for key, value in state.items()}

    def group(self, members: list[Bucket], ids: list[int]) -> Group:
        """The group of some buckets, its tensors measurable at this scope."""
        group = members[0].group
        for name in ("params", "grads"):
            lists: list[TensorList] = [getattr(bucket, name) for bucket in self.buckets]
            group[name] = TensorList([t for some in lists for t in some.tensors])
            group[name].norms = lambda lists=lists: self.pick(self.measure(lists), ids)
        group["total"] = lambda: self.total([bucket.u for bucket in self.buckets])
        return group

    def spread(self, bucket: Bucket, ids: list[int], vector: Tensor) -> Tensor | list[Tensor]:
        """A vector over units as operands for a bucket: one for all tensors, or one a tensor."""
        param, dtype = bucket.params.tensors[0], bucket.state_dtype
        if not param.is_complex() and vector.is_complex():
            vector = vector.real
        if not vector.is_complex():
            dtype = statistic_dtype(param)
        vector = vector.to(param.device, torch.bool if vector.dtype == torch.bool else dtype)
        if self.slices is not None:
            return self._spread_slices(bucket, ids, vector)
        if len(ids) == 1:
            return vector[0]
        place = {unit: i for i, unit in enumerate(ids)}
        parts = vector.unbind(0)
        return [parts[place[unit]] for unit in self.unit_of[self.buckets.index(bucket)]]

    def _spread_slices(self, bucket: Bucket, ids: list[int], vector: Tensor) -> list[Tensor]:
        starts = self.unit_of[self.buckets.index(bucket)]
        sizes = [b - a for a, b in itertools.pairwise(starts)]
        offset = starts[0] - ids[0] if ids else 0
        parts = vector[offset : offset + sum(sizes)].split(sizes)
        dims = [self.rule.dims(t) for t in bucket.params.tensors]
        shapes = [
            [1 if d in row else n for d, n in enumerate(t.shape)]
            for t, row in zip(bucket.params.tensors, dims, strict=True)
        ]
        return [
            part.view(shape) if part.numel() == math.prod(shape) else part.view(())
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def per_tensor(self, bucket: Bucket, ids: list[int], vector: Tensor) -> list[Tensor]:
        """A vector over whole-tensor units as one 0-dim tensor for each tensor of a bucket."""
        each = self.spread(bucket, ids, vector)
        return [each] * len(bucket.params) if isinstance(each, Tensor) else each

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """Vectors of `owners`, joined in the order of the units."""
        ids = [i for own, _ in self.owners for i in own]
        place = {unit: i for i, unit in enumerate(ids)}
        return self.pick(torch.cat(list(parts)), [place[i] for i in range(self.count)])

    def known(self, norm: Tensor) -> Tensor:
        """Which units have a norm that is a number, in the precision that state is kept in."""
        return torch.isfinite(norm.to(self.dtype))

    # ------------------------------------------------------------------ state of units

    def load(self) -> UnitState:
        """The state of the units: one tensor for each key of `init_unit`, stacked."""
        made = self.rule.init_unit()
        if not made:
            return {}
        path = self.buckets[0].bound.path
        self.cells: dict[str, list[Tensor]] = {}
        for key, value in made.items():
            self.cells[key] = self._cells(f"{path}/{key}", value)
        return {
            key: torch.stack([cell.to(self.home) for cell in cells])
            for key, cells in self.cells.items()
        }

    def _cells(self, key: str, value: Any) -> list[Tensor]:
        """The tensor that holds one number of each unit; several owners hold the same tensor."""
        cells: list[Tensor | None] = [None] * self.count
        for bucket, units in zip(self.buckets, self.unit_of, strict=True):
            places: list[dict[str, Any]] = bucket.memory
            if self.rule.scope == "group":
                places = [bucket.shared] * len(bucket.params)
            elif self.rule.scope == "global":
                places = [bucket.groups[0]["chain"]] * len(bucket.params)
            for param, memory, unit in zip(bucket.params.tensors, places, units, strict=True):
                held = cells[unit]
                if held is None:
                    if key not in memory:
                        memory[key] = statistic(value, param)
                    elif not isinstance(memory[key], Tensor) or memory[key].device != self.home:
                        memory[key] = statistic(memory[key], param)
                    cells[unit] = memory[key]
                elif memory.get(key) is not held:
                    memory[key] = held
        if self.rule.scope == "global":
            for group in self.buckets[0].groups:
                if group["chain"].get(key) is not cells[0]:
                    group["chain"][key] = cells[0]
        return [cell for cell in cells if cell is not None]

    def store(self, state: UnitState) -> None:
        """Write vectors back into the tensors that hold the units' numbers."""
        for key, value in state.items():
            torch._foreach_copy_(self.cells[key], list(value.unbind(0)))
