"""Layouts: how the dims of a parameter become matrices, in the notation of einops."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from torchzero_clip.core.argument_values import is_row
from torchzero_clip.core.torch_private import cached

LayoutEntry: TypeAlias = "str | Sequence[int | tuple[str, int]]"
"""The matrices of one parameter: a pattern, or a list of row counts and (pattern, size) pairs."""
MatrixLayout: TypeAlias = (
    "Mapping[str, LayoutEntry] | Callable[[str, Tensor], LayoutEntry | None] | None"
)
"""The type of `layout`: the matrices in each parameter.

A dict maps a pattern of names to an entry. A function receives the name and the tensor, and returns
an entry, or None for a parameter without a layout.
"""
Axes: TypeAlias = "tuple[str, ...]"
"""The names of the axes of one dim."""
TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[()1])")
SIZE = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*")


class Pattern(NamedTuple):
    """A pattern such as "(gate rows) d -> gate rows d, gate=2".

    Attributes:
        left: The axes of each dim of the parameter.
        right: The axes of each dim of the result: dims of the stack, the rows, and the columns.
        sizes: The given sizes of axes.
    """

    left: tuple[Axes, ...]
    right: tuple[Axes, ...]
    sizes: dict[str, int]


def heads(*counts: int, size: int | Sequence[int]) -> list[tuple[str, int]]:
    """Return the layout of a weight that contains one matrix for each attention head.

    The heads follow each other along the first dim.

    Args:
        *counts: The number of heads of each kind, such as 32 queries, 8 keys and 8 values.
        size: The number of rows of a head, or a list with the number of rows for each kind.

    Example:
        >>> import torch
        >>> from torchzero_clip import LR, Modular, Orthogonalize, heads
        >>> model = torch.nn.ModuleDict({"qkv": torch.nn.Linear(64, 48 * 16, bias=False)})
        >>> muon = Orthogonalize(layout={"qkv.weight": heads(32, 8, 8, size=16)})
        >>> opt = Modular(model.named_parameters(), muon, LR(1e-3))
    """
    sizes = list(size) if is_row(size) else [size] * len(counts)
    wrong = [x for x in [*counts, *sizes] if not _is_count(x)]
    if not counts or wrong or len(sizes) != len(counts):
        raise ValueError(
            "heads: give the number of heads of each kind, and one size or a size for each kind, "
            f"all integers of at least 1, got heads({', '.join(map(repr, counts))}, size={size!r})"
        )
    parts: list[tuple[str, int]] = []
    kinds = zip(sizes, counts, strict=True)
    for rows, of_size in itertools.groupby(kinds, key=lambda kind: kind[0]):
        count = sum([n for _, n in of_size])
        parts.append((f"(head k) d -> head k d, k={rows}", count * rows))
    return parts


@cached
def parsed(text: str) -> Pattern:
    """Return a pattern from its text, or raise ValueError with the reason."""
    left_text, arrow, rest = text.partition("->")
    if not arrow:
        raise ValueError("the pattern has no '->' between its two sides")
    right_text, *size_texts = rest.split(",")
    left = _dims(left_text)
    right = _dims(right_text)
    sizes: dict[str, int] = {}
    for size_text in size_texts:
        match = SIZE.fullmatch(size_text)
        if match is None or not int(match[2]):
            raise ValueError(f"{size_text.strip()!r} is not a size such as 'head=8'")
        sizes[match[1]] = int(match[2])
    axes = [axis for dim in left for axis in dim]
    others = [axis for dim in right for axis in dim]
    for side in (axes, others):
        twice = [axis for axis in side if side.count(axis) > 1]
        if twice:
            raise ValueError(f"the name {twice[0]!r} appears twice on one side of the pattern")
    lonely = sorted({*axes} ^ {*others}) or sorted({*sizes} - {*axes})
    if lonely:
        raise ValueError(f"the name {lonely[0]!r} must be on both sides of the pattern")
    if len(right) < 2:
        raise ValueError(
            "the last two dims on the right side must be the rows and the columns of a matrix"
        )
    return Pattern(left, right, sizes)


def _dims(text: str) -> tuple[Axes, ...]:
    """Return the axes of each dim on one side of a pattern."""
    dims: list[list[str]] = []
    is_open = False
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or (match[1] == "(" and is_open) or (match[1] == ")" and not is_open):
            raise ValueError(f"{text[position:].strip()!r} is not a dim such as 'd' or '(head k)'")
        token = match[1]
        position = match.end()
        if token == ")":
            is_open = False
        elif token == "(":
            is_open = True
            dims.append([])
        else:
            if not is_open:
                dims.append([])
            if token != "1":
                dims[-1].append(token)
    if is_open:
        raise ValueError("the pattern has a '(' without a ')'")
    return tuple(map(tuple, dims))


def axis_sizes(pattern: Pattern, shape: Sequence[int]) -> dict[str, int]:
    """Return the size of each axis of a pattern for a shape, or raise ValueError."""
    if len(pattern.left) != len(shape):
        raise ValueError(f"the pattern has {len(pattern.left)} dims on its left side")
    sizes = dict(pattern.sizes)
    for d, (axes, n) in enumerate(zip(pattern.left, shape, strict=True)):
        unknown = [axis for axis in axes if axis not in sizes]
        known = math.prod([sizes[axis] for axis in axes if axis in sizes])
        if len(unknown) > 1:
            raise ValueError(
                f"dim {d} has the axes {', '.join(axes)}: give the sizes of all but one, such as "
                f"'{unknown[0]}=2'"
            )
        if n % known or (not unknown and n != known):
            raise ValueError(f"dim {d} has size {n}, which the pattern cannot divide by {known}")
        if unknown:
            sizes[unknown[0]] = n // known
    return sizes


def parts_of(entry: Any) -> list[tuple[str | None, int | None]]:
    """Return the parts of an entry along the first dim: a pattern and a size for each part.

    A part without a pattern is one matrix. A part without a size is the whole parameter.
    """
    if isinstance(entry, str):
        return [(entry, None)]
    parts: list[tuple[str | None, int | None]] = []
    for part in entry if is_row(entry) else [None]:
        if _is_count(part):
            parts.append((None, part))
        elif is_row(part) and len(part) == 2 and isinstance(part[0], str) and _is_count(part[1]):
            parts.append((part[0], part[1]))
        else:
            raise ValueError(
                "a layout must be a pattern, such as '(gate rows) d -> gate rows d, gate=2', or a "
                "list of integers (the rows of each matrix) and pairs (pattern, rows)"
            )
    if not parts:
        raise ValueError("the list is empty")
    return parts


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
