"""Units: the tensors that a norm rule measures together, and the methods to work on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.bucket import Bucket
from torchzero_clip.core.decision import Cells, Decision, UnitState
from torchzero_clip.core.division import Division, UnitRecord
from torchzero_clip.core.engine import Group, State
from torchzero_clip.core.lazy import Joined
from torchzero_clip.core.logical_matrices import Grid
from torchzero_clip.core.norms import slices
from torchzero_clip.core.norms.shards import across, merge_shards
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.layout import local
from torchzero_clip.core.state import statistic_dtype
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.core.unit_state import UnitStore

SUM = norms.NAMED["sum"]


class Units(Cells):
    """The units of a rule in one step, and methods that measure and scale all of them at once.

    A unit is everything that one norm covers: a slice of a tensor, a tensor, a layer, a parameter
    group, or all tensors. The methods receive and return vectors with one element per unit. A value
    that differs between parameter groups is a list with one such vector per group. Every tensor
    uses the vector of its group. In this vector, it uses the element of its unit.

    Args:
        buckets: The buckets of a step.
        scope: The kind of unit: None (each tensor), `"layer"`, `"group"`, `"global"`, or slices.
        measure: The norm order, as a Measure.
        dims: A function that returns the dims of a tensor along which its slices run.
        name: The name of the rule in error messages.
        apart: Whether each `norm_group` is a separate unit if the scope is `"global"`.
        grids: A function that returns the slices of a parameter for the norms of matrices, or None
            if `dims` decides. Its arguments are the name and the parameter.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        scope: Any,
        measure: norms.Measure = norms.NAMED["l2"],
        dims: Callable[[Tensor], tuple[int, ...]] | None = None,
        name: str = "Units",
        apart: bool = False,
        grids: Callable[[str, Tensor], Grid | None] | None = None,
    ) -> None:
        self.buckets = sorted(buckets, key=lambda bucket: bucket.cohort.index)
        self.order = measure
        self.name = name
        cohorts = [bucket.cohort for bucket in self.buckets]
        kind = tuple(scope) if isinstance(scope, list) else scope
        if scope is None or isinstance(scope, str):
            dims = None  # units are not slices
        step = self.buckets[0].step
        named: tuple[Any, ...] = ()
        if apart and scope == "global":
            # All groups are named, since another pipeline stage may have gradients of a norm group
            # that has none here.
            named = tuple([group.get("norm_group") for group in step.groups])
            if not any([*named, *[cohort.norm_group for cohort in cohorts]]):
                named = ()
        self.division: Division = step.roster.once(
            (kind, grids or dims, named, *cohorts),
            lambda: Division(cohorts, scope, dims, name, named, grids),
        )
        units = self.division
        self.home = units.home
        self.dtype = units.dtype
        self.count = units.count
        self.degree = measure.degree
        self.groups = [
            [b for b in self.buckets if b.cohort.index == index] for index in units.indexes
        ]
        self._stats: Tensor | None = None  # the statistics of the update, once it is measured
        self._measured: dict[Any, Tensor] | None = None  # the measurements of the update so far

    # ------------------------------------------------------------------ what is measured

    def norm(self, name: str | None = None) -> Tensor:
        """Return the norm of every unit of the update, or of the state with this name."""
        if name is None:
            joint = self._joint_norm()
            return self._norms(self._flowing()) if joint is None else joint
        return self.norms_of([bucket.state[name] for bucket in self.buckets])

    def take(self, stats: Tensor) -> None:
        """Use these statistics of the update, one column per tensor, instead of measuring them."""
        self._stats = self._of_all_shards([stats], self.order)

    def mean(self) -> Tensor:
        """Return the mean of every unit of the update. It is complex if a tensor is complex."""
        flowing = [bucket.u for bucket in self.buckets]
        sums, sizes = self._joined(self.statistics(flowing, SUM), SUM)
        assert sizes is not None
        mean = sums / sizes.clamp(min=1)
        return torch.complex(mean[0], mean[1]) if self.division.complex else mean[0]

    def sums_of(self, lists: Sequence[TensorList]) -> Tensor:
        """Return the sum over every unit of real lists, one list per bucket."""
        return self._joined(self.statistics(lists, SUM), SUM)[0][0]

    def total(self) -> Tensor:
        """Return the norm of the whole update."""
        whole = Units(self.buckets, "global", self.order, name=self.name)
        if self.division.lengths is None:
            whole._stats = self._flowing()
        return whole.norm()[0]

    def norms_of(self, lists: Sequence[TensorList]) -> Tensor:
        """Return the norm of every unit of these lists, one list per bucket."""
        return self._norms(self.statistics(lists, self.order))

    def measure(self, tensors: TensorList) -> Tensor:
        """Return the norm of every unit of a list with one tensor per parameter."""
        return self.norms_of(self._by_bucket(tensors, "measure"))

    def dot(self, lists: Sequence[TensorList], others: Sequence[TensorList]) -> Tensor:
        """Return the inner product of every unit of two lists, one pair of lists per bucket.

        For complex tensors, the result is the real part of the inner product.
        """
        division = self.division
        pairs = [(a.tensors, b.tensors) for a, b in zip(lists, others, strict=True)]
        if division.lengths is None:
            stats = self._of_all_shards([norms.products(*pair) for pair in pairs], SUM)
        else:
            products = [norms.entrywise(*x) for pair in pairs for x in zip(*pair, strict=True)]
            rows = zip(division.viewed(products), division.dims, strict=True)
            stats = self._of_all_shards([slices.slice_statistics(*row, SUM) for row in rows], SUM)
        return self._joined(stats, SUM)[0][0]

    def _dot(self, tensors: TensorList, others: TensorList) -> Tensor:
        """Return the inner product of every unit of two lists with one tensor per parameter."""
        return self.dot(self._by_bucket(tensors, "dot"), self._by_bucket(others, "dot"))

    def _by_bucket(self, tensors: TensorList, verb: str) -> Sequence[TensorList]:
        """Split a list with one tensor per parameter into one list per bucket."""
        if isinstance(tensors, Joined) and tensors.pending:
            return tensors.lists
        counts = [len(bucket.cohort.places) for bucket in self.buckets]
        if len(tensors) != sum(counts):
            raise ValueError(
                f"{self.name}.{verb} needs TensorLists with one tensor per parameter: "
                f"{counted(sum(counts), 'tensor')}, got {len(tensors)}"
            )
        rest = iter(tensors.tensors)
        return [TensorList(list(itertools.islice(rest, n))) for n in counts]

    def after(self, norm: Tensor, divisors: Sequence[Tensor]) -> Tensor:
        if not self.division.shared:
            return super().after(norm, divisors)
        columns = [
            divisor.to(self.home, norm.dtype)
            for members, ratio in zip(self.groups, divisors, strict=True)
            for bucket in members
            for divisor in self.as_list(bucket, ratio)
        ]
        stats = self._flowing()
        return self._norms(stats / torch.stack(columns) if self.degree else stats)

    def over(
        self,
        numbers: Tensor,
        whole: bool = True,
        function: Callable[..., Tensor] = torch.linalg.vector_norm,
    ) -> Tensor:
        """Return for each slice a number of the matrix that contains the slice.

        By default, this number is the root of the sum of the squares of the slices' numbers.

        Args:
            numbers: A number for each slice.
            whole: Whether the result is about matrices. Otherwise it is about rows or columns. They
                differ from slices only if a parameter is sharded along a dim with several axes.
            function: A function that computes the number of a matrix from the numbers of its
                slices. It accepts `dim` and `keepdim`.
        """
        division = self.division
        assert division.lengths is not None
        if not whole and not division.has_finer:
            return numbers
        parts = numbers.split(division.lengths)
        if whole and not division.has_fused and function is torch.linalg.vector_norm:
            shaped = [part.view(x) for part, x in zip(parts, division.slices, strict=True)]
            every = [tuple(range(len(shape))) for shape in division.slices]
            return torch.cat(slices.along(shaped, every))
        pairs = zip(parts, division.matrix_grids, strict=True)
        return torch.cat([found.over(part, whole, function) for part, found in pairs])

    def of_shapes(self, like: Tensor, number: Callable[..., float], *args: Any) -> Tensor:
        """Return a vector such as `like` with number(shape, *args) for each unit.

        `shape` is the shape of the unit's tensor.
        """
        shapes = [p.shape for bucket in self.buckets for p in bucket.originals]
        counts = self.division.lengths or [1] * len(shapes)
        rows = zip(shapes, counts, strict=True)
        return norms.numbers([x for shape, n in rows for x in [number(shape, *args)] * n], like)

    def smaller_than(self, size: int) -> Tensor:
        """Return a flag for each unit: whether the unit has fewer than `size` elements.

        If the tensor of a unit lacks the dims of slices, the flag is also set.
        """
        small = self.division.smaller_than(size)
        none = torch.zeros(self.count, dtype=torch.bool, device=self.home)
        return none if small is None else small

    def too_small(self, size: int) -> Tensor | None:
        return self.division.smaller_than(size)

    def comparable(self, limit: Tensor | float, norm: Tensor) -> Tensor | float:
        shape = limit.shape if isinstance(limit, Tensor) else torch.Size()
        if shape not in (norm.shape, torch.Size(), torch.Size([1])):
            raise ValueError(
                f"{self.name}.limit must return a number or {norm.numel()} numbers, one per unit, "
                f"got a tensor with shape {tuple(shape)}"
            )
        return super().comparable(limit, norm)

    # ------------------------------------------------------------------ values of groups

    def each(self, live: str) -> list[Any]:
        """Return the live hyperparameter with this name, for every group."""
        return [members[0].group[live] for members in self.groups]

    def live(self) -> list[Group]:
        """Return every group for a rule, with the parameters and gradients of all units."""
        methods = {"total": self.total, "dot": self._dot, "of_shapes": self.of_shapes}
        groups = [members[0].numbers_of_group() | methods for members in self.groups]
        params = [bucket.params for bucket in self.buckets]
        grads = [bucket.grads for bucket in self.buckets]
        for group in groups:
            group["params"] = self._joined_lists(params)
            group["grads"] = self._joined_lists(grads)
        return groups

    def _joined_lists(self, lists: Sequence[TensorList]) -> TensorList:
        """Return one list of all parameters. Its method `measure` returns the units' norms."""
        joined = Joined(lists)
        joined.measure = self.measure
        return joined

    def of_first_group(self, vectors: Sequence[Tensor]) -> Tensor:
        """Join one vector per group into one vector. A unit uses the vector of its first group."""
        return self.division.of_first_group(vectors)

    # ------------------------------------------------------------------ changes

    def divide(self, bucket: Bucket, u: TensorList, ratio: Tensor) -> TensorList:
        """Return u divided by the ratios of its units. If all ratios are 1, it returns u."""
        # With a scope of one tensor, the ratio is a vector even if the bucket has one tensor.
        number = self.division.scope in ("group", "global")
        if number:
            ratio = self._entry(bucket, ratio)
        return bucket.session.divide(u, ratio, partial(self.operand, bucket), number)

    def scale(
        self, divisors: Sequence[Tensor], updates: Sequence[TensorList] | None = None
    ) -> None:
        """Divide the updates by the divisors of each group. `updates` replace `bucket.u`."""
        flowing = iter(updates or [bucket.u for bucket in self.buckets])
        for members, ratio in zip(self.groups, divisors, strict=True):
            for bucket in members:
                u = next(flowing)
                if self._leaves_to_tail(bucket, u):
                    bucket.ratio = self._entry(bucket, ratio)
                else:
                    bucket.u = self.divide(bucket, u.to(bucket.cohort.state_dtype), ratio)

    def _leaves_to_tail(self, bucket: Bucket, u: TensorList) -> bool:
        """Return whether the tail of the chain divides the update of a bucket."""
        if bucket.bound not in bucket.step.factors:
            return False
        target = bucket.bound.transform.target
        return target == "update" or u.tensors[0] is bucket.update.tensors[0]

    def _entry(self, bucket: Bucket, vector: Tensor) -> Tensor:
        """Return one element of a vector, for a bucket whose tensors form a single unit."""
        division = self.division
        if self.count == 1:
            return vector
        return vector[division.unit_of[division.starts[bucket.cohort]]].view(1)

    def lerp_(self, name: str, weights: Sequence[Tensor], where: Tensor) -> None:
        """Compute m ← m + weight · (u - m) for a state m, in the units whose flag is set.

        Args:
            name: The name of the state.
            weights: One vector per group.
            where: The flags, a vector over all units.
        """
        for members, weight in zip(self.groups, weights, strict=True):
            for bucket in members:
                m = bucket.state[name]
                flags = self.as_list(bucket, where)
                end = bucket.view(_chosen, flags=flags, m=m)
                m.lerp_(end, self.as_list(bucket, weight))
                bucket.settle()

    def div_(self, name: str, ratio: Tensor) -> None:
        """Compute m ← m / ratio for the state m with this name."""
        for bucket in self.buckets:
            self.divide(bucket, bucket.state[name], ratio)
            bucket.settle()

    def load(self, made: dict[str, Any]) -> UnitState:
        """Return the state of the units: for each name in `made`, a vector in float64."""
        self._store = UnitStore(self.buckets, self.division)
        return self._store.load(made)

    def store(self, state: UnitState) -> None:
        """Store the vectors of the units' state."""
        self._store.store(state)

    def unknown(self) -> Decision:
        """Return a decision of NaN, for a step in which no norm is measured."""
        lengths = self.division.lengths
        count = self.count if lengths is None else sum(lengths)
        unknown = torch.full((count,), torch.nan, device=self.home)
        per_group = [unknown] * len(self.groups)
        return Decision(unknown, per_group, per_group, {})

    def record(self, decision: Decision) -> None:
        """Record a decision and its units for `metrics()`."""
        step = self.buckets[0].step
        link = self.buckets[0].bound
        step.record[link.path] = UnitRecord(*decision[:3], self.division, step.groups)

    # ------------------------------------------------------------------ vectors as operands

    def operand(
        self, bucket: Bucket, vector: Tensor | float, dtype: torch.dtype | None = None
    ) -> Operand:
        """Convert a vector over units to an operand for the tensors of a bucket.

        The operand is one number for all tensors, one number per tensor, or for each tensor another
        tensor with the values of its slices.

        Args:
            bucket: A bucket of these units.
            vector: A vector over all units. A number is returned as it is.
            dtype: The dtype of the operand, by default the dtype of scalars in the bucket's state.
        """
        if not isinstance(vector, Tensor):
            return vector
        if not bucket.dtype.is_complex and vector.is_complex():
            vector = vector.real
        param = bucket.originals[0]
        division = self.division
        if dtype is None:
            dtype = bucket.state_dtype if vector.is_complex() else statistic_dtype(param)
        vector = vector.to(bucket.device, torch.bool if vector.dtype == torch.bool else dtype)
        start = division.starts[bucket.cohort]
        end = start + len(bucket.cohort.places)
        if division.lengths is not None:
            first = sum(division.lengths[:start])
            last = sum(division.lengths[:end])
            rows = division.rows[bucket.cohort]
            ratios = slices.of_rows(vector[first:last], rows)
            grids = division.matrix_grids
            if bucket.cohort.sharded:
                ratios = bucket.parts(ratios)
                if grids and grids[0].kind == "matrix":
                    ratios = slices.as_fused(ratios, vector, rows)
            elif division.is_scattered and isinstance(ratios, slices.OfRows):
                ratios.fused = True
            for i, found in enumerate(division.grids[start:end] if division.has_split else ()):
                if found is not None and found.is_split:  # the list has the unsplit shapes
                    shape = local(bucket.originals[i]).shape
                    ratios[i] = ratios[i].expand(found.local_view(shape)).reshape(shape)
            return ratios
        if division.scope is None:
            return vector[start:end]
        if division.scope in ("group", "global"):
            return vector[0 if len(vector) == 1 else division.unit_of[start]]
        entries = vector.unbind(0)
        return [entries[unit] for unit in division.unit_of[start:end]]

    def as_list(self, bucket: Bucket, vector: Tensor) -> TensorList:
        """Convert a vector over units to one tensor for each tensor of a bucket."""
        values: Any = self.operand(bucket, vector)
        if isinstance(values, Tensor):
            count = len(bucket.cohort.places)
            values = [values] * count if values.dim() == 0 else list(values.unbind())
        return TensorList(values)

    # ------------------------------------------------------------------ statistics

    def _flowing(self) -> Tensor:
        """Return the statistics of the update. They are measured only once."""
        if self._stats is None:
            known = self._measurements()
            key = (self.order, *self.division.cohorts)
            if key not in known:
                known[key] = self.statistics(self._updates, self.order)
            self._stats = known[key]
        return self._stats

    def _joint_norm(self) -> Tensor | None:
        """Return the norm of all tensors together, or None if statistics are the fastest way."""
        division = self.division
        step = self.buckets[0].step
        alone = self.count == 1 and division.lengths is None and self._stats is None
        if not alone or division.sharded or step.process_group is not None:
            return None
        known = self._measurements()
        key = ("joint", self.order, *division.cohorts)
        norm = known.get(key)
        if norm is None:
            tensors: list[Tensor] = []
            for u in self._updates:
                if type(u) is not TensorList or u.tensors[0].device != self.home:
                    return None
                tensors += u.tensors
            norm = norms.joint_norm(tensors, self.order)
            if norm is not None:
                known[key] = norm
        return norm

    def _measurements(self) -> dict[Any, Tensor]:
        """Return the measurements so far. Measurements of gradients are shared by all links."""
        if self._measured is None:
            self._updates = [bucket.u for bucket in self.buckets]
            first = self.buckets[0]
            shared = first.bound.transform.target == "update" and self.division.lengths is None
            for bucket in self.buckets:
                if bucket.origin != "gradient" or bucket.update.owned:
                    shared = False
            if torch.compiler.is_compiling():
                shared = False
            self._measured = first.step.measured if shared else {}
        return self._measured

    def statistics(self, lists: Sequence[TensorList], m: norms.Measure) -> Tensor:
        """Return the statistics of lists: one column per tensor or per slice."""
        if self.division.lengths is None:
            return self._of_all_shards([tensors.statistics(m) for tensors in lists], m)
        pairs = zip(lists, self.buckets, strict=True)
        parts = [x._row_statistics(self.division.rows[b.cohort], m) for x, b in pairs]
        known = [stats for stats in parts if stats is not None]
        if len(known) == len(lists) and not self.division.sharded:
            without = self.division.flags([not dims for dims in self.division.dims])
            return self._of_all_shards(known, m).masked_fill(without, 0)
        tensors = self.division.viewed([t for part in lists for t in part])
        return self._of_all_shards(norms.statistics_of_slices(tensors, self.division.dims, m), m)

    def _of_all_shards(self, parts: Sequence[Tensor], m: norms.Measure) -> Tensor:
        """Merge statistics of the parts on all ranks to statistics of whole tensors or slices."""
        division = self.division
        stats = parts[0] if len(parts) == 1 else torch.cat([x.to(self.home) for x in parts], dim=1)
        if not division.sharded:
            return stats
        lengths = [1] * stats.shape[1]
        if division.lengths is not None:
            lengths = [part.shape[1] for part in parts]
        return merge_shards(stats, lengths, division.gathered(stats), m)

    def _norms(self, stats: Tensor) -> Tensor:
        """Return the norms of units from statistics of tensors or slices."""
        return norms.finish(*self._joined(stats, self.order), self.order)

    def _joined(self, stats: Tensor, m: norms.Measure) -> tuple[Tensor, Tensor | None]:
        """Merge statistics of tensors or slices to statistics of units.

        Returns:
            The statistics, and the number of elements of each unit if the measure uses it.
        """
        units = self.division
        step = self.buckets[0].step
        sized = m.counts or m.kind == "sum"
        if units.lengths is not None:
            return stats, units.constant(units.sizes).to(stats.dtype) if sized else None
        if units.width > 1 and units.count > 1:  # units with fewer tensors are filled with zeros
            columns = [*stats.unbind(1), torch.zeros_like(stats[:, 0])]
            stats = torch.stack([columns[i] for i in units.columns], 1)
        table = stats.view(len(stats), units.count, units.width)
        group = None if units.positions is None else step.process_group
        if not (sized or group is not None):
            return norms.merge(table, None, m), None
        counts = norms.numbers(units.entries, table).view(-1, units.width)
        stats = norms.merge(table, counts, m)
        sizes = counts.sum(dim=1)
        if units.positions is None or group is None:
            return stats, sizes
        count = len(step.groups) if units.scope == "group" or units.named else 1
        return across(stats, sizes, m, units.positions, max(count, 1), group)


def _chosen(u: TensorList, state: State, group: Group) -> TensorList:
    """Return u in the units whose flag is set, and m in other units."""
    return u.where(group["flags"], group["m"])
