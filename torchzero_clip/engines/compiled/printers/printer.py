"""Printer: the parts of printing vector programs that C++ and Triton have in common.

A `Printer` receives the segments of a step. A segment is a sequence of vector nodes and launches.
`CppPrinter` prints the segments for `replay/native_step.py`. `TritonPrinter` prints them for
`replay/device_step.py`.

A value that only one loop uses is a local variable of this loop. Such a value needs no memory.
Kernels look up sizes, strides and addresses in tables. So models that differ only in sizes, strides
or addresses share a kernel.
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
"""For each nested loop: the number of iterations, and the stride of each region."""


class LoopHeads(NamedTuple):
    """Nested loops over a shape.

    Attributes:
        heads: The heads of the loops, the outer loop first.
        inside: The first statements inside the innermost loop.
        steps: For each region: the index variables, each with its stride.
        mask: The mask of the lanes, or None if the loops process one element at a time.
    """

    heads: list[str]
    inside: list[str]
    steps: dict[Region, list[tuple[str, int]]]
    mask: str | None


def steps_of(
    regions: Sequence[Region], dims: LoopDims, names: Sequence[str]
) -> dict[Region, list[tuple[str, int]]]:
    """Return the index variables of loops for each region, each variable with its stride."""
    rows = list(zip(names, dims, strict=True))
    return {x: [(name, strides[k]) for name, (_, strides) in rows] for k, x in enumerate(regions)}


def index_of(table: list[Any], x: Any) -> int:
    """Return the index of an item in a table. If the table lacks the item, append it first."""
    if x not in table:
        table.append(x)
    return table.index(x)


def nodes_of(loop: Loop) -> list[VectorNode]:
    """Return the nodes of a loop, without launches."""
    return [node for node in loop.nodes if isinstance(node, VectorNode)]


class Printer:
    """A printer of the segments of a step.

    Args:
        memories: The blocks of memory. A region refers to its block by an index.
        segments: The segments, in the order of the step.
        read: The indices of the blocks that other code reads.

    Attributes:
        backed: The indices of the blocks that must exist. The other blocks are only local variables
            of a loop.
        pointers: The table of addresses that a kernel looks up.
        integers: The table of integers that a kernel looks up, such as sizes and strides.
    """

    language: ClassVar[Language]

    def __init__(
        self,
        memories: Sequence[VectorMemory],
        segments: Sequence[Sequence[VectorNode | Launched]],
        read: Collection[int],
    ) -> None:
        self.memories = memories
        self.pointers = list[Any]()
        self.integers = list[Any]()
        self.loops = [loops(segment, memories) for segment in segments]
        self.backed = set(read) | self._shared()
        self._count = 0

    def _shared(self) -> set[int]:
        """Return the indices of the blocks that cannot be a local variable of one loop."""
        users = dict[int, set[Any]]()
        shared = set[int]()
        all_loops = list(itertools.chain(*self.loops))
        for i, loop in enumerate(all_loops):
            for x in regions_of(loop.nodes):
                if loop.open and not self.in_rows(x):
                    users.setdefault(x.memory, set()).add((i, x))
                else:
                    shared |= touched([x], self.memories)
        written = {node.out.memory for loop in all_loops for node in nodes_of(loop)}
        local = {memory for memory, uses in users.items() if len(uses) == 1} & written
        return shared | (users.keys() - local)

    def stored(self, region: Region) -> bool:
        """Return whether a region is in memory. Otherwise it is a local variable of a loop."""
        return region.memory in self.backed or not self.memories[region.memory].own

    def name(self, letter: str) -> str:
        """Return a new name that begins with a letter."""
        self._count += 1
        return f"{letter}{self._count}"

    # ------------------------------------------------------------------ texts of the language

    def integer(self, n: Any) -> str:
        """Return the text with which a kernel looks up an integer."""
        raise NotImplementedError

    def address(self, x: Region, *loops: LoopHeads) -> str:
        """Return the address of an element of a region, as text."""
        raise NotImplementedError

    def load(self, x: Region, *loops: LoopHeads) -> str:
        """Return the text that reads an element of a region."""
        raise NotImplementedError

    def store(self, x: Region, value: str, *loops: LoopHeads) -> str:
        """Return a statement that writes an element of a region."""
        raise NotImplementedError

    def language_at(self, name: str) -> Language:
        """Return the language in which an operator is printed."""
        return self.language

    # ------------------------------------------------------------------ loops

    def in_rows(self, region: Region) -> bool:
        """Return whether each index of the first dim of a region has a separate memory block."""
        return bool(self.memories[region.memory].rows)

    def dims(self, shape: Sequence[int], regions: Sequence[Region]) -> LoopDims:
        """Return the nested loops over a shape.

        Neighboring dims become one loop if they are contiguous in all regions.
        """
        rows = any(map(self.in_rows, regions))
        dims = list[tuple[int, list[int]]]()
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
        """Return loops over a shape that process one element at a time."""
        dims = self.dims(shape, regions)
        names = [self.name("j") for _ in dims]
        sizes = [self.integer(n) for n, _ in dims]
        heads = [self.language.loop.format(*row) for row in zip(names, sizes, strict=True)]
        return LoopHeads(heads, [], steps_of(regions, dims, names), None)

    def lanes(self, shape: Sequence[int], regions: Sequence[Region]) -> LoopHeads:
        """Return loops over a shape that process one element per lane at the same time.

        If the language has no lanes, the loops process one element at a time.
        """
        return self.each(shape, regions)

    def around(self, loops: LoopHeads, body: Sequence[str]) -> list[str]:
        """Return the text of loops around statements."""
        lines = [*loops.inside, *body]
        for head in reversed(loops.heads):
            lines = [head, *[f"    {line}" for line in lines], *self.language.end]
        return lines

    def index(self, x: Region, loops: Sequence[LoopHeads]) -> tuple[str, list[str]]:
        """Return the row of an element and the terms of its offset. Without rows, the row is ""."""
        steps = [step for heads in loops for step in heads.steps[x]]
        row = steps.pop(0)[0] if self.in_rows(x) else ""
        start = [self.integer(x.start)] if x.start else []
        products = [(name, self.integer(step)) for name, step in steps if step]
        return row, [*start, *[x if n == "1" else f"{x} * {n}" for x, n in products]]

    # ------------------------------------------------------------------ nodes

    def lines(self, loop: Loop) -> list[str]:
        """Return a loop as statements. The loop must not be a launch."""
        first = nodes_of(loop)[0]
        if loop.open:
            return self._elementwise(loop)
        return self._norm(first) if first.name == "norm" else self._reduction(first)

    def _elementwise(self, loop: Loop) -> list[str]:
        """Return the statements that run all nodes of a loop on each element."""
        nodes = nodes_of(loop)
        known = dict[Region, Named]()
        lines = list[str]()
        element = self.lanes(loop.shape, list(dict.fromkeys(regions_of(nodes))))

        def let(letter: str, x: Region, text: str) -> None:
            known[x] = Named(self.name(letter), x.dtype)
            lines.append(self.language.let(known[x].name, text, x.dtype))

        for node in nodes:
            for x in node.given:
                if isinstance(x, Region) and x not in known:
                    let("x", x, self.load(x, element))
            operands = [known[x] if isinstance(x, Region) else x for x in node.given]
            text = self.language_at(node.name).expression(node.name, operands, node.dtype)
            let("v", node.out, text)
            if self.stored(node.out):
                lines.append(self.store(node.out, known[node.out].name, element))
        return self.around(element, lines)

    def _reduction(self, node: VectorNode) -> list[str]:
        """Return a reduction as statements.

        The outer loop goes over the results. The inner loop goes over the reduced dims. The loop
        with more iterations is spread over lanes.
        """
        x = node.given[0]
        assert isinstance(x, Region)
        dims = len(node.out.shape)
        dtype = node.dtype
        begin, joined, how, end = REDUCTIONS[node.name]
        count = math.prod(x.shape[dims:])
        left = x.of(range(dims))
        rest = x.of(range(dims, len(x.shape)))
        if count > math.prod(node.out.shape):
            outer = self.each(left.shape, [node.out, left])
            inner = self.lanes(rest.shape, [rest])
        else:
            outer = self.lanes(left.shape, [node.out, left])
            inner = self.each(rest.shape, [rest])
        outer.steps[x] = outer.steps[left]
        inner.steps[x] = inner.steps[rest]
        total = self.name("all")
        mask = outer.mask or inner.mask
        language = self.language
        kind = language.types[dtype]
        body = [
            language.let(f"{total}_x", self.load(x, outer, inner), dtype),
            language.joins.format(kind, total, joined.format(total, f"{total}_x"), mask or "True"),
        ]
        last = language.lanes.format(total, how) if inner.mask else total
        shape = "(LANES,)" if mask else "()"
        lines = [
            language.begins.format(kind, total, language.number(begin, dtype), shape),
            *self.around(inner, body),
            language.let(f"{total}_out", end.format(last, n=self.integer(count)), node.out.dtype),
            self.store(node.out, f"{total}_out", outer),
        ]
        return self.around(outer, lines)

    def _norm(self, node: VectorNode) -> list[str]:
        """Return the statements of a norm over the last dim."""
        x = node.given[0]
        assert isinstance(x, Region)
        left = x.of(range(len(x.shape) - 1))
        element = self.each(node.out.shape, [node.out, left])
        size = self.integer(x.shape[-1])
        step = self.integer(x.strides[-1])
        norm = self.name("all")
        power = self.language.number(node.power, torch.float64)
        text = f"norm_in_range({self.address(left, element)}, {size}, {step}, {power})"
        line = self.language.let(norm, text, node.out.dtype)
        return self.around(element, [line, self.store(node.out, norm, element)])
