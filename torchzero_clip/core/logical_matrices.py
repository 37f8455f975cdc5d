"""Logical matrices: the matrices that a parameter contains, as rules about matrices process them.

`matrices_of` is the only function that decides which matrices a parameter contains.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.layout_patterns import axis_sizes, parsed, parts_of
from torchzero_clip.core.names import by_name, check_patterns
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.layout import layout_of
from torchzero_clip.core.torch_private import cached

NormKind: TypeAlias = Literal["row", "column", "longer", "matrix"]
"""What a norm covers: a row of a matrix, a column, the longer of both, or the whole matrix."""


@dataclass(frozen=True)
class Cut:
    """Matrices of one shape in some consecutive slices of a parameter along its first dim.

    Attributes:
        start: The first slice.
        shape: The shape of these slices together.
        axes: For each dim of the slices, the sizes of the axes that the dim consists of.
        order: The indices of all axes in the order of the stack, the rows and the columns.
        row_axes: The indices of the axes that the rows consist of.
        column_axes: The indices of the axes that the columns consist of.
        flat: The sizes of all axes.
        rows: The number of rows of a matrix.
        columns: The number of columns of a matrix.
        count: The number of matrices.
        in_order: Whether the matrices have the order of the parameter's elements.
    """

    start: int
    shape: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    row_axes: tuple[int, ...]
    column_axes: tuple[int, ...]

    flat: tuple[int, ...] = field(init=False, compare=False, repr=False)
    rows: int = field(init=False, compare=False, repr=False)
    columns: int = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)
    in_order: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        flat = tuple([n for sizes in self.axes for n in sizes])
        inside = {*self.row_axes, *self.column_axes}
        long = [a for a in self.order if flat[a] != 1]
        computed = {
            "flat": flat,
            "rows": math.prod([flat[a] for a in self.row_axes]),
            "columns": math.prod([flat[a] for a in self.column_axes]),
            "count": math.prod([n for a, n in enumerate(flat) if a not in inside]),
            "in_order": long == sorted(long),
        }
        _set_computed(self, computed)

    def of(self, part: Tensor) -> Tensor:
        """Return the matrices as (count, rows, columns): a view of `part` if strides allow it."""
        form = self.count, self.rows, self.columns
        if self.in_order:
            return part.reshape(form)
        return part.reshape(self.flat).permute(self.order).reshape(form)

    def back(self, matrices: Tensor) -> Tensor:
        """Return a tensor in the shape of the slices: the inverse of `of`."""
        if self.in_order:
            return matrices.reshape(self.shape)
        ordered = matrices.reshape([self.flat[a] for a in self.order])
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return ordered.permute(inverse).reshape(self.shape)

    def along(self, kind: NormKind) -> tuple[int, ...]:
        """Return the dims of (count, rows, columns) that one norm covers."""
        if kind == "longer":
            kind = "column" if self.rows < self.columns else "row"
        return {"row": (2,), "column": (1,), "matrix": (1, 2)}[kind]

    def covered(self, kind: NormKind) -> set[int]:
        """Return the axes that one norm covers."""
        of_dims = {1: self.row_axes, 2: self.column_axes}
        return {a for dim in self.along(kind) for a in of_dims[dim]}

    def reduced(self, axes: Iterable[int]) -> Cut:
        """Return the cut of a tensor in which these axes have size 1."""
        left = set(axes)
        flat = [1 if a in left else n for a, n in enumerate(self.flat)]
        sizes = iter(flat)
        new = tuple([tuple([next(sizes) for _ in dim]) for dim in self.axes])
        shape = tuple(map(math.prod, new))
        return Cut(self.start, shape, new, self.order, self.row_axes, self.column_axes)


@dataclass(frozen=True)
class LogicalMatrices:
    """All matrices of a parameter.

    Attributes:
        shape: The shape of the parameter.
        cuts: The matrices, cut by cut. Each cut has matrices of one shape.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each matrix, the index of its cut, and its index in this cut."""
        return [(c, k) for c, cut in enumerate(self.cuts) for k in range(cut.count)]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The rows and columns of each matrix."""
        return [(cut.rows, cut.columns) for cut in self.cuts for _ in range(cut.count)]

    def of(self, t: Tensor) -> list[Tensor]:
        """Return the matrices of each cut, of shape (count, rows, columns)."""
        if len(self.cuts) == 1:
            return [self.cuts[0].of(t)]
        return [cut.of(t[cut.start : cut.start + cut.shape[0]]) for cut in self.cuts]

    def back(self, stacks: Sequence[Tensor]) -> Tensor:
        """Return one tensor in the shape of the parameter: the inverse of `of`."""
        parts = [cut.back(stack) for cut, stack in zip(self.cuts, stacks, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def with_columns_as_rows(self) -> LogicalMatrices:
        """Return the same matrices, with each matrix of a single column as a single row."""
        cuts = []
        for cut in self.cuts:
            if cut.columns == 1:
                stack = [a for a in cut.order if a not in {*cut.row_axes, *cut.column_axes}]
                order = (*stack, *cut.column_axes, *cut.row_axes)
                cut = Cut(cut.start, cut.shape, cut.axes, order, cut.column_axes, cut.row_axes)
            cuts.append(cut)
        return LogicalMatrices(self.shape, tuple(cuts))

    def __str__(self) -> str:
        """Return words such as "48 matrices of 128 × 4096"."""
        counts: dict[tuple[int, int], int] = {}
        for cut in self.cuts:
            counts[cut.rows, cut.columns] = counts.get((cut.rows, cut.columns), 0) + cut.count
        words = []
        for (rows, columns), count in counts.items():
            words.append(f"{counted(count, 'matrix', 'matrices')} of {rows} × {columns}")
        return ", ".join(words)


@dataclass(frozen=True)
class Grid:
    """Slices of a parameter, from whose norms follow the norms of rows, columns or matrices.

    Attributes:
        source: The matrices of the parameter.
        kind: What a norm covers.
        splits: For each dim of the parameter, the sizes into which the dim is split, so that a
            slice runs along whole dims.
        dims: The dims, after the splits, that a slice runs along.
        matrices: The matrices of a tensor with one element per slice.
        along: For each cut of these matrices, the dims of (count, rows, columns) that a norm
            covers.
        view: The shape of the parameter after the splits.
        is_split: Whether a dim of the parameter is split.
        is_finer: Whether a norm covers several slices.
        is_fused: Whether the rows or matrices may be scattered in the memory of a fused parameter.
        has_columns: Whether a norm covers a column, which is scattered in the memory of any
            parameter.
    """

    source: LogicalMatrices
    kind: NormKind
    splits: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    matrices: LogicalMatrices
    along: tuple[tuple[int, ...], ...]

    view: tuple[int, ...] = field(init=False, compare=False, repr=False)
    is_split: bool = field(init=False, compare=False, repr=False)
    is_finer: bool = field(init=False, compare=False, repr=False)
    is_fused: bool = field(init=False, compare=False, repr=False)
    has_columns: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        view = tuple([n for sizes in self.splits for n in sizes])
        forms = [(cut.count, cut.rows, cut.columns) for cut in self.matrices.cuts]
        pairs = zip(forms, self.along, strict=True)
        computed = {
            "view": view,
            "is_split": len(view) > len(self.splits),
            "is_finer": any([form[d] != 1 for form, dims in pairs for d in dims]),
            "is_fused": len(self.source.cuts) > 1 or not self.source.cuts[0].in_order,
            "has_columns": (1,) in self.along,
        }
        _set_computed(self, computed)

    def viewed(self, t: Tensor) -> Tensor:
        """Return a tensor in the shape of the parameter, or of its shard, after the splits."""
        return t.view(self.local_view(t.shape)) if self.is_split else t

    def local_view(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of a shard after the splits. Sharded dims are not split."""
        view: list[int] = []
        for n, sizes in zip(shape, self.splits, strict=True):
            view += (n // math.prod(sizes[1:]), *sizes[1:])
        return view

    def over(self, numbers: Tensor, whole: bool, function: Callable[..., Tensor]) -> Tensor:
        """Return for each slice a number of the unit that contains the slice.

        Args:
            numbers: A vector with one number per slice.
            whole: Whether the unit is the matrix. Otherwise it is what a norm covers.
            function: A function that computes the number of a unit from the numbers of its slices.
                It accepts `dim` and `keepdim`.
        """
        stacks = self.matrices.of(numbers.view(self.matrices.shape))
        results = []
        for stack, along in zip(stacks, self.along, strict=True):
            of_units = function(stack, dim=(1, 2) if whole else along, keepdim=True)
            results.append(of_units.expand(stack.shape))
        return self.matrices.back(results).reshape(-1)

    @property
    def norms(self) -> list[tuple[int, int, int]]:
        """For each cut, the number of matrices, and of the norms along their rows and columns."""
        coarse = grid(self.source, self.kind).matrices
        forms = [(cut.count, cut.rows, cut.columns) for cut in coarse.cuts]
        pairs = zip(forms, self.along, strict=True)
        return [
            (form[0], 1 if 1 in dims else form[1], 1 if 2 in dims else form[2])
            for form, dims in pairs
        ]

    @property
    def _is_sorted(self) -> bool:
        """Whether slices are norms, in the order of the matrices."""
        return not self.is_finer and all([cut.in_order for cut in self.source.cuts])

    def spread(self, numbers: Tensor) -> Tensor:
        """Return a vector with a number for each slice.

        Args:
            numbers: A number for each norm, in the order of the matrices.
        """
        if self._is_sorted:
            return numbers.flatten()
        parts = numbers.flatten().split(list(map(math.prod, self.norms)))
        stacks = []
        for part, form, cut in zip(parts, self.norms, self.matrices.cuts, strict=True):
            stacks.append(part.view(form).expand(cut.count, cut.rows, cut.columns))
        return self.matrices.back(stacks).reshape(-1)

    def collect(self, numbers: Tensor) -> Tensor:
        """Return a vector with a number for each norm, from equal numbers for its slices."""
        if self._is_sorted:
            return numbers
        stacks = self.matrices.of(numbers.view(self.matrices.shape))
        pairs = zip(stacks, self.norms, strict=True)
        return torch.cat(
            [stack[:, :rows, :columns].flatten() for stack, (_, rows, columns) in pairs]
        )


@functools.lru_cache(maxsize=4096)
def grid(matrices: LogicalMatrices, kind: NormKind, fixed: int = 0) -> Grid:
    """Return slices whose norms give the norms of rows, columns or matrices.

    Args:
        matrices: The matrices of a parameter.
        kind: What a norm covers.
        fixed: The number of leading dims that are not split, because the parameter is sharded along
            one of them. If a norm covers only a part of such a dim, the slices are smaller.
    """
    cuts = matrices.cuts
    splits: list[tuple[int, ...]] = []
    dims: list[int] = []
    reduced: list[set[int]] = [set() for _ in cuts]
    for d, n in enumerate(matrices.shape):
        inside = [_inside(cut, d, kind) for cut in cuts]
        if len(cuts) == 1 and d >= fixed:
            runs = _runs(cuts[0], inside[0]) or [(n, True)]
        else:
            # the cuts follow each other along the first dim, so no slice may run along it
            covers_all = all([all(flags.values()) for flags in inside])
            runs = [(n, covers_all and (d > 0 or len(cuts) == 1))]
        first = sum(map(len, splits))
        dims += [first + i for i, (_, covered) in enumerate(runs) if covered]
        splits.append(tuple([size for size, _ in runs]))
        is_split = len(runs) > 1
        for axes, flags in zip(reduced, inside, strict=True):
            axes |= {a for a, flag in flags.items() if flag and (is_split or runs[0][1])}
    if not dims and splits:  # each element is a slice, along a new dim of size 1
        dims.append(sum(map(len, splits)))
        splits[-1] = (*splits[-1], 1)
    small = [cut.reduced(axes) for cut, axes in zip(cuts, reduced, strict=True)]
    shape = small[0].shape
    if len(small) > 1:
        shape = (sum([cut.shape[0] for cut in small]), *shape[1:])
    along = tuple([cut.along(kind) for cut in cuts])
    new = LogicalMatrices(shape, tuple(small))
    return Grid(matrices, kind, tuple(splits), tuple(dims), new, along)


def grid_of(matrices: LogicalMatrices, kind: NormKind, param: Tensor) -> Grid:
    """Return the slices of a parameter, which may be sharded."""
    layout = layout_of(param)
    sharded = [] if layout is None else [layout.placements[i].dim for i in layout.split]
    return grid(matrices, kind, max(sharded, default=-1) + 1)


def _inside(cut: Cut, d: int, kind: NormKind) -> dict[int, bool]:
    """Return for each axis of a dim whether a norm covers the axis. Axes of size 1 are left out."""
    first = sum(map(len, cut.axes[:d]))
    covered = cut.covered(kind)
    axes = range(first, first + len(cut.axes[d]))
    return {a: a in covered for a in axes if cut.flat[a] != 1}


def _runs(cut: Cut, inside: Mapping[int, bool]) -> list[tuple[int, bool]]:
    """Return the sizes of the parts of a dim, and whether a norm covers each part."""
    runs: list[tuple[int, bool]] = []
    for covered, group in groupby(inside.items(), key=lambda axis: axis[1]):
        runs.append((math.prod([cut.flat[a] for a, _ in group]), covered))
    return runs


# ---------------------------------------------------------------------- which matrices


def matrices_of(
    rule: Any, name: str, param: Tensor, takes_complex: bool = False
) -> LogicalMatrices:
    """Return the matrices of a parameter for a rule, from the `layout` of the rule.

    Without a layout, a tensor of two dims is a matrix, and a tensor of four or more dims is a
    convolution, a matrix of shape (first, rest).
    """
    shape = tuple(param.shape)
    entry = entry_of(rule, name, param)
    refused = param.is_complex() and not takes_complex
    if refused or (entry is None and len(shape) < 2):
        raise ValueError(
            f"{type(rule).__name__} accepts only matrices of real numbers, got a parameter of "
            f"shape {shape} and dtype {param.dtype}: use Partition or a second optimizer for "
            "this parameter"
        )
    if entry is not None:
        return _fitted(f"{type(rule).__name__}: ", entry, name, shape)
    if len(shape) == 3:
        count, rows, columns = shape
        key = name or "*"
        declare = f"layout={{{key!r}: 'e rows columns -> e rows columns'}}"
        if not hasattr(rule, "layout"):
            declare = f"a field layout: MatrixLayout = None in {type(rule).__name__}, and {declare}"
        raise ValueError(
            f"{type(rule).__name__}: {name or 'a parameter'} of shape {shape} may be a stack of "
            f"matrices or one matrix: write {declare} for "
            f"{counted(count, 'matrix', 'matrices')} of {rows} x {columns}, "
            f"or the pattern 'rows a b -> rows (a b)' for one matrix of {count} x {rows * columns}"
        )
    return whole_matrix(shape)


def entry_of(rule: Any, name: str, param: Tensor) -> Any:
    """Return the entry of a rule's `layout` for a parameter, or None."""
    layout = getattr(rule, "layout", None)
    if isinstance(layout, Mapping):
        key = by_name(layout, name)
        return None if key is None else layout[key]
    return None if layout is None else layout(name, param)


def check_layout(rule: Any) -> None:
    """Raise an error unless the `layout` of a rule is a dict of valid entries or a function."""
    if not isinstance(rule.layout, Mapping):
        if rule.layout is not None and not callable(rule.layout):
            raise TypeError(
                f"{type(rule).__name__}: layout must be a dict of name patterns and layouts, such "
                "as {'*.qkv': '(three k) d -> three k d, three=3'}, or a function of name and "
                f"tensor, got {rule.layout!r}"
            )
        return
    check_patterns(rule, "layout")
    for key, entry in rule.layout.items():
        try:
            for text, _ in parts_of(entry):
                if text is not None:
                    parsed(text)
        except ValueError as error:
            raise ValueError(
                f"{type(rule).__name__}: the layout {entry!r} for the names {key!r} is invalid: "
                f"{error}, got {rule.layout!r}"
            ) from None


def logical_matrices(entry: Any, tensor: Tensor) -> list[Tensor]:
    """Return the matrices that a layout finds in a tensor.

    Args:
        entry: The layout of the tensor: a pattern, or a list such as `heads` returns.
        tensor: The tensor.

    Example:
        >>> import torch
        >>> from torchzero_clip import logical_matrices
        >>> gate, up = logical_matrices("(gate rows) d -> gate rows d, gate=2", torch.zeros(6, 4))
        >>> gate.shape
        torch.Size([3, 4])
    """
    shape = tuple(tensor.shape)
    stacks = _fitted("logical_matrices: ", entry, "the tensor", shape).of(tensor)
    return [matrix for stack in stacks for matrix in stack]


def join_matrices(entry: Any, shape: Sequence[int], matrices: Sequence[Tensor]) -> Tensor:
    """Return the tensor that consists of some matrices: the inverse of `logical_matrices`.

    Use it to convert the weights or the optimizer state of separate parameters into a fused
    parameter.

    Args:
        entry: The layout of the tensor: a pattern, or a list such as `heads` returns.
        shape: The shape of the tensor.
        matrices: The matrices.

    Example:
        >>> import torch
        >>> from torchzero_clip import join_matrices
        >>> gate, up = torch.zeros(3, 4), torch.ones(3, 4)
        >>> fused = join_matrices("(rows gate) d -> gate rows d, gate=2", (6, 4), [gate, up])
        >>> fused[:, 0]
        tensor([0., 1., 0., 1., 0., 1.])
    """
    every = _fitted("join_matrices: ", entry, "the tensor", tuple(shape))
    given = [tuple(matrix.shape) for matrix in matrices]
    if given != every.sizes:
        raise ValueError(
            f"join_matrices: with the layout {entry!r}, a tensor of shape {tuple(shape)} consists "
            f"of {every}, got matrices of the shapes {given}"
        )
    rest = iter(matrices)
    return every.back([torch.stack([next(rest) for _ in range(c.count)]) for c in every.cuts])


def _set_computed(owner: Cut | Grid, values: Mapping[str, Any]) -> None:
    """Set fields that follow from other fields. `setattr` refuses, because owners are frozen."""
    for name, value in values.items():
        object.__setattr__(owner, name, value)


def whole_matrix(shape: Sequence[int]) -> LogicalMatrices:
    """Return a single matrix of shape (first, rest)."""
    return _whole(tuple(shape))


@cached
def _whole(shape: tuple[int, ...]) -> LogicalMatrices:
    cut = _cut_of_rows(0, 1, shape) if shape else Cut(0, (), (), (), (), ())
    return LogicalMatrices(shape, (cut,))


def _fitted(whose: str, entry: Any, name: str, shape: tuple[int, ...]) -> LogicalMatrices:
    """Return the matrices of a tensor from its entry. Errors show the entry and the shape."""
    try:
        return _cut(tuple(parts_of(entry)), shape)
    except ValueError as error:
        raise ValueError(
            f"{whose}the layout {entry!r} does not fit {name or 'a parameter'} of shape {shape}: "
            f"{error}"
        ) from None


@cached
def _cut(
    parts: tuple[tuple[str | None, int | None], ...], shape: tuple[int, ...]
) -> LogicalMatrices:
    """Return the matrices of a parameter from the parts of its entry."""
    if not shape:
        raise ValueError("a tensor with no dims contains no matrix")
    texts = [text for text, _ in parts]
    sizes = [shape[0] if size is None else size for _, size in parts]
    if sum(sizes) != shape[0]:
        raise ValueError(f"the sum of the sizes is {sum(sizes)}, but the first dim has {shape[0]}")
    cuts: list[Cut] = []
    start = 0
    for (text, size), run in groupby(zip(texts, sizes, strict=True)):
        count = len(list(run))
        if text is None:  # matrices with equally many rows are one cut, so that none is copied
            cuts.append(_cut_of_rows(start, count, (size, *shape[1:])))
            start += count * size
            continue
        for _ in range(count):
            cuts.append(_cut_of_pattern(start, (size, *shape[1:]), text))
            start += size
    return LogicalMatrices(shape, tuple(cuts))


def _cut_of_rows(start: int, count: int, shape: tuple[int, ...]) -> Cut:
    """Return a cut of matrices of shape (first, rest) that follow each other."""
    rows, *rest = shape
    axes = ((count, rows), *[(n,) for n in rest])
    every = tuple(range(len(rest) + 2))
    return Cut(start, (count * rows, *rest), axes, every, every[1:2], every[2:])


def _cut_of_pattern(start: int, shape: tuple[int, ...], text: str) -> Cut:
    """Return a cut of the matrices of a pattern."""
    pattern = parsed(text)
    sizes = axis_sizes(pattern, shape)
    names = [axis for dim in pattern.left for axis in dim]
    *stack, rows, columns = [tuple([names.index(axis) for axis in dim]) for dim in pattern.right]
    order = (*[a for dim in stack for a in dim], *rows, *columns)
    axes = tuple([tuple([sizes[axis] for axis in dim]) for dim in pattern.left])
    return Cut(start, shape, axes, order, rows, columns)
