"""Printer: vector programs as text, in what C++ and Triton have in common.

A value that is read in its own loop alone needs no memory. Sizes, steps and addresses are looked up
in tables, so that models that differ in nothing else share a library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from torchzero_clip.engines.compiled.printers.language import Language, Named
from torchzero_clip.engines.compiled.printers.loops import Loop, loops
from torchzero_clip.engines.compiled.printers.operators import REDUCTIONS
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    Region,
    VectorMemory,
    VectorNode,
    regions_of,
    touched,
)

LoopDims: TypeAlias = "list[tuple[int, list[int]]]"
"""The sizes of loops, and for each of them the steps of some regions."""


class LoopHeads(NamedTuple):
    """Loops over a shape.

    Attributes:
        heads: Their heads, one inside the other.
        inside: What stands first inside them.
        steps: For each region the indices, and how far apart their entries are.
        mask: Which lanes there are; None where an entry goes by at a time.
    """

    heads: list[str]
    inside: list[str]
    steps: dict[Region, list[tuple[str, int]]]
    mask: str | None


def steps_of(
    regions: Sequence[Region], dims: LoopDims, names: Sequence[str]
) -> dict[Region, list[tuple[str, int]]]:
    """For each region the indices of loops, and how far apart their entries are."""
    rows = list(zip(names, dims, strict=True))
    return {x: [(name, row[k]) for name, (_, row) in rows] for k, x in enumerate(regions)}


def index_of(row: list[Any], x: Any) -> int:
    """Where something is in a table, where it is put if it is not there."""
    if x not in row:
        row.append(x)
    return row.index(x)


def nodes_of(loop: Loop) -> list[VectorNode]:
    """The nodes of a loop that are no launches."""
    return [node for node in loop.nodes if isinstance(node, VectorNode)]


class Printer:
    """The segments of a step.

    Args:
        memories: Those of the regions.
        segments: Nodes in a row.
        read: Memories that others than these nodes look at.

    Attributes:
        backed: All memories that are more than a value in a loop.
        pointers, integers: What a text looks up while it runs: whose address, and sizes and steps.
    """

    language: ClassVar[Language]

    def __init__(
        self,
        memories: Sequence[VectorMemory],
        segments: Sequence[Sequence[VectorNode | Launched]],
        read: Collection[int],
    ) -> None:
        self.memories, self.pointers, self.integers = memories, list[Any](), list[Any]()
        self.loops = [loops(segment, memories) for segment in segments]
        self.backed = set(read) | self._shared()
        self._count = 0

    def _shared(self) -> set[int]:
        """Memories in which more than one loop, or more than one region of it, looks."""
        users, found = dict[int, set[Any]](), set[int]()
        every = list(itertools.chain(*self.loops))
        for i, loop in enumerate(every):
            for x in regions_of(loop.nodes):
                if loop.open and not self.in_rows(x):
                    users.setdefault(x.memory, set()).add((i, x))
                else:
                    found |= touched([x], self.memories)
        written = {node.out.memory for loop in every for node in nodes_of(loop)}
        once = {memory for memory, regions in users.items() if len(regions) == 1} & written
        return found | (users.keys() - once)

    def stored(self, region: Region) -> bool:
        """Whether what is written there is more than a value in a loop."""
        return region.memory in self.backed or not self.memories[region.memory].own

    def name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    # ------------------------------------------------------------------ what a language says

    def integer(self, n: Any) -> str:
        """A whole number, which is looked up."""
        raise NotImplementedError

    def address(self, x: Region, *loops: LoopHeads) -> str:
        """Where an entry of a region lies."""
        raise NotImplementedError

    def load(self, x: Region, *loops: LoopHeads) -> str:
        """The value of an entry."""
        raise NotImplementedError

    def store(self, x: Region, value: str, *loops: LoopHeads) -> str:
        """A statement that writes an entry."""
        raise NotImplementedError

    def words(self, name: str) -> Language:
        """The language, at an operator."""
        return self.language

    # ------------------------------------------------------------------ loops

    def in_rows(self, region: Region) -> bool:
        """Whether its first dim goes from one memory to the next."""
        return bool(self.memories[region.memory].rows)

    def dims(self, shape: Sequence[int], regions: Sequence[Region]) -> LoopDims:
        """The loops over a shape: dims that lie behind one another in all regions are one."""
        rows, dims = any(map(self.in_rows, regions)), list[tuple[int, list[int]]]()
        for d, n in enumerate(shape):
            steps = [x.strides[d] for x in regions]
            if n == 1:
                continue
            last = dims[-1][1] if dims and not (rows and d == 1) else None
            if last is not None and all([a == b * n for a, b in zip(last, steps, strict=True)]):
                dims[-1] = dims[-1][0] * n, steps
            else:
                dims.append((n, steps))
        return dims

    def each(self, shape: Sequence[int], regions: Sequence[Region]) -> LoopHeads:
        """Loops over a shape, an entry at a time."""
        dims = self.dims(shape, regions)
        names = [self.name("j") for _ in dims]
        sizes = [self.integer(n) for n, _ in dims]
        heads = [self.language.loop.format(*row) for row in zip(names, sizes, strict=True)]
        return LoopHeads(heads, [], steps_of(regions, dims, names), None)

    def lanes(self, shape: Sequence[int], regions: Sequence[Region]) -> LoopHeads:
        """The same, as many entries at a time as there are lanes."""
        return self.each(shape, regions)

    def around(self, loops: LoopHeads, body: Sequence[str]) -> list[str]:
        """Statements inside loops."""
        lines = [*loops.inside, *body]
        for head in reversed(loops.heads):
            lines = [head, *[f"    {line}" for line in lines], *self.language.end]
        return lines

    def index(self, x: Region, loops: Sequence[LoopHeads]) -> tuple[str, list[str]]:
        """Which of its rows an entry lies in, and the terms whose sum says where in it."""
        steps = [step for some in loops for step in some.steps[x]]
        row = steps.pop(0)[0] if self.in_rows(x) else ""
        start = [self.integer(x.start)] if x.start else []
        products = [(name, self.integer(step)) for name, step in steps if step]
        return row, [*start, *[x if n == "1" else f"{x} * {n}" for x, n in products]]

    # ------------------------------------------------------------------ nodes

    def lines(self, loop: Loop) -> list[str]:
        """The statements of a loop that is no launch."""
        first = nodes_of(loop)[0]
        if loop.open:
            return self._entries(loop)
        return self._norm(first) if first.name == "norm" else self._reduction(first)

    def _entries(self, loop: Loop) -> list[str]:
        """The statements of all nodes for each entry."""
        nodes, known, lines = nodes_of(loop), dict[Region, Named](), list[str]()
        entry = self.lanes(loop.shape, list(dict.fromkeys(regions_of(nodes))))

        def let(letter: str, x: Region, text: str) -> None:
            known[x] = Named(self.name(letter), x.dtype)
            lines.append(self.language.let(known[x].name, text, x.dtype))

        for node in nodes:
            for x in node.given:
                if isinstance(x, Region) and x not in known:
                    let("x", x, self.load(x, entry))
            given = [known[x] if isinstance(x, Region) else x for x in node.given]
            text = self.words(node.name).expression(node.name, given, node.dtype)
            let("v", node.out, text)
            if self.stored(node.out):
                lines.append(self.store(node.out, known[node.out].name, entry))
        return self.around(entry, lines)

    def _reduction(self, node: VectorNode) -> list[str]:
        """Lanes go over what is joined where that is more than what is made, and else over that."""
        x, dims, dtype = node.given[0], len(node.out.shape), node.dtype
        assert isinstance(x, Region)
        begin, joined, how, end = REDUCTIONS[node.name]
        count = math.prod(x.shape[dims:])
        across = count > math.prod(node.out.shape)
        outer_of, inner_of = (self.each, self.lanes) if across else (self.lanes, self.each)
        left, rest = x.of(range(dims)), x.of(range(dims, len(x.shape)))
        outer, inner = outer_of(left.shape, [node.out, left]), inner_of(rest.shape, [rest])
        outer.steps[x], inner.steps[x] = outer.steps[left], inner.steps[rest]
        all, mask, say = self.name("all"), outer.mask or inner.mask, self.language
        kind, number = say.words[dtype], say.number(begin, dtype)
        body = [
            say.let(f"{all}_x", self.load(x, outer, inner), dtype),
            say.joins.format(kind, all, joined.format(all, f"{all}_x"), mask or "True"),
        ]
        last = say.lanes.format(all, how) if inner.mask else all
        lines = [
            say.begins.format(kind, all, number, "(LANES,)" if mask else "()"),
            *self.around(inner, body),
            say.let(f"{all}_out", end.format(last, n=self.integer(count)), node.out.dtype),
            self.store(node.out, f"{all}_out", outer),
        ]
        return self.around(outer, lines)

    def _norm(self, node: VectorNode) -> list[str]:
        x = node.given[0]
        assert isinstance(x, Region)
        left = x.of(range(len(x.shape) - 1))
        entry = self.each(node.out.shape, [node.out, left])
        size, step = [self.integer(row[-1]) for row in (x.shape, x.strides)]
        all, power = self.name("all"), self.language.number(node.power, torch.float64)
        text = f"norm_in_range({self.address(left, entry)}, {size}, {step}, {power})"
        line = self.language.let(all, text, node.out.dtype)
        return self.around(entry, [line, self.store(node.out, all, entry)])
