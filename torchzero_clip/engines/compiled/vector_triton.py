"""Vector programs in Triton: a kernel of one program does all nodes between two launches.

Entries go by as many as there are lanes. What one loop writes and another reads lies in memory,
with a barrier between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchzero_clip.engines.compiled.arithmetic import ENTRIES, REDUCTIONS
from torchzero_clip.engines.compiled.launches import POINTERS
from torchzero_clip.engines.compiled.loops import Loop
from torchzero_clip.engines.compiled.operators import IN_DOUBLE
from torchzero_clip.engines.compiled.printer import LoopDims, Printer, Tables, nodes_of
from torchzero_clip.engines.compiled.vectors import Number, Region, VectorNode, VectorOperand

SOURCE = """import triton
import triton.language as tl

from torchzero_clip.engines.compiled.kernel import *


@triton.jit(do_not_specialize={names})
def kernel({arguments}):
    d = p + {count}
    lane = tl.arange(0, LANES)
    {lines}
"""


class VectorKernel(NamedTuple):
    """A kernel.

    Attributes:
        text: Its page.
        signature: Its arguments and their types.
        sources: The memories that it is given, which are others in every step.
        words: The table that it looks the rest up in: a whole number, or a memory and which of its
            entries, whose address it is.
    """

    text: str
    signature: dict[str, str]
    sources: list[int]
    words: list[int | tuple[int, int]]


class Over(NamedTuple):
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

    def around(self, body: Sequence[str]) -> list[str]:
        """Statements inside these loops."""
        lines = [*self.inside, *body]
        for head in reversed(self.heads):
            lines = [head, *[f"    {line}" for line in lines]]
        return lines


class TritonPrinter(Printer):
    """The kernels of a step in Triton."""

    def kernel(self, part: Sequence[Loop]) -> VectorKernel:
        """The kernel of some loops in a row."""
        self.tables, self._count, self._head = Tables(), 0, list[str]()
        body: list[str] = []
        for loop in part:
            body += ["tl.debug_barrier()"] * bool(body)
            body += self._loop(loop)
        pointers, integers = self.tables.pointers, self.tables.integers
        words: list[int | tuple[int, int]] = [*[(m, 0) for m in pointers], *integers]
        head = list(dict.fromkeys(self._head))
        for i, m in enumerate(pointers):
            if self.memories[m].rows:
                head.append(f"m{i} = p + {len(words)}")
                words += self.memories[m].rows
        sources = {i: m for i, m in enumerate(pointers) if self.memories[m].source is not None}
        kinds = {f"s{i}": POINTERS[self.memories[m].dtype] for i, m in sources.items()}
        signature, lines = {"p": "*i64", **kinds}, "\n    ".join([*head, *body])
        arguments = ", ".join([f'{name}: "{kind}"' for name, kind in signature.items()])
        given = {"names": list(signature), "arguments": arguments, "count": len(pointers)}
        text = SOURCE.format(lines=lines, **given)
        return VectorKernel(text, signature, list(sources.values()), words)

    def _loop(self, loop: Loop) -> list[str]:
        first = nodes_of(loop)[0]
        if loop.open:
            return self._entries(loop)
        return self._norm(first) if first.name == "norm" else self._reduction(first)

    # ------------------------------------------------------------------ what is looked up

    def _integer(self, n: int) -> str:
        """A whole number of the table."""
        if n in (0, 1):
            return str(n)
        where = self.tables.integer(n)[2:-1]
        self._head.append(f"n{where} = tl.load(d + {where})")
        return f"n{where}"

    def _memory(self, place: Region) -> str:
        """The address of a memory; of rows that of a table of addresses."""
        where, kind = self.tables.pointer(place.memory)[2:-1], stored_as(place.dtype)
        if not self.in_rows(place):
            changes = self.memories[place.memory].source is not None
            value = f"s{where}" if changes else f"tl.load(p + {where})"
            self._head.append(f"m{where} = {value}.to(tl.pointer_type(tl.{kind}))")
        return f"m{where}"

    # ------------------------------------------------------------------ loops

    def _lanes(self, shape: Sequence[int], places: Sequence[Region]) -> Over:
        """A loop over a shape, as many entries at a time as there are lanes."""
        dims = self.dims(shape, places)
        if not dims:  # a single entry
            return self._over([], [], places, dims, [], None)
        i, size = self.name("i"), " * ".join([self._integer(n) for n, _ in dims])
        head = f"for {i}_0 in range(0, {size}, LANES):"
        inside = [f"{i} = {i}_0 + lane.to(tl.int64)", f"{i}_mask = {i} < {size}"]
        names = list[str]()
        for k, (n, _) in enumerate(reversed(dims[1:])):
            inside.append(f"{i}_{k + 1} = {i} % {self._integer(n)}")
            names.append(f"{i}_{k + 1}")
            inside.append(f"{i} = {i} // {self._integer(n)}")
        return self._over([head], inside, places, dims, [i, *reversed(names)], f"{i}_mask")

    def _each(self, shape: Sequence[int], places: Sequence[Region]) -> Over:
        """Loops over a shape, an entry at a time."""
        dims = self.dims(shape, places)
        names = [self.name("j") for _ in dims]
        heads = [
            f"for {name} in range(0, {self._integer(n)}):"
            for name, (n, _) in zip(names, dims, strict=True)
        ]
        return self._over(heads, [], places, dims, names, None)

    def _over(
        self,
        heads: list[str],
        inside: list[str],
        places: Sequence[Region],
        dims: LoopDims,
        names: Sequence[str],
        mask: str | None,
    ) -> Over:
        steps = {
            x: [(name, row[k]) for name, (_, row) in zip(names, dims, strict=True)]
            for k, x in enumerate(places)
        }
        return Over(heads, inside, steps, mask)

    def _at(self, x: Region, *loops: Over) -> tuple[str, str | None]:
        """The address of an entry of a region, and the mask where lanes look at several."""
        at, steps = self._memory(x), [step for over in loops for step in over.steps[x]]
        mask = next((over.mask for over in loops if over.mask), None)
        if self.in_rows(x):
            row = f"{at} + {steps[0][0]}{f', mask={mask}, other=0' * bool(mask)}"
            at, steps = f"tl.load({row}).to(tl.pointer_type(tl.{stored_as(x.dtype)}))", steps[1:]
        elif not any([step for over in loops if over.mask for _, step in over.steps[x]]):
            mask = None
        parts = [self._integer(x.start)] if x.start else []
        parts += [f"{name} * {self._integer(step)}" for name, step in steps if step]
        return " + ".join([at, *parts]), mask

    def _load(self, x: Region, *loops: Over) -> str:
        at, mask = self._at(x, *loops)
        text = f"tl.load({at}{f', mask={mask}, other=0' * bool(mask)})"
        return f"({text} != 0)" if x.dtype == torch.bool else text

    def _store(self, x: Region, value: str, over: Over) -> str:
        at, mask = self._at(x, over)[0], over.mask
        return f"tl.store({at}, {value}.to(tl.{stored_as(x.dtype)}){f', mask={mask}' * bool(mask)})"

    # ------------------------------------------------------------------ entries

    def _entries(self, loop: Loop) -> list[str]:
        """The statements of all nodes for each entry."""
        nodes = nodes_of(loop)
        every = [x for node in nodes for x in (node.out, *node.given) if isinstance(x, Region)]
        over = self._lanes(loop.shape, list(dict.fromkeys(every)))
        known: dict[Region, str] = {}
        lines = []
        for node in nodes:
            for x in node.given:
                if isinstance(x, Region) and x not in known:
                    known[x] = self.name("x")
                    lines.append(f"{known[x]} = {self._load(x, over)}")
            kind = torch.float64 if node.name in IN_DOUBLE else node.dtype
            given = [operand(x, known, kind) for x in node.given]
            result = ENTRIES[node.name].format(*given, lib="tl.", power="power")
            known[node.out] = self.name("v")
            lines.append(f"{known[node.out]} = ({result}).to(tl.{word(node.out.dtype)})")
            if self.stored(node.out):
                lines.append(self._store(node.out, known[node.out], over))
        return over.around(lines)

    # ------------------------------------------------------------------ reductions

    def _reduction(self, node: VectorNode) -> list[str]:
        """Lanes go over what is joined where that is more than what is made, and else over that."""
        x, kept = node.given[0], len(node.out.shape)
        assert isinstance(x, Region)
        begin, joined, join, end = REDUCTIONS[node.name]
        count, kind = math.prod(x.shape[kept:]), word(node.dtype)
        across = count > math.prod(node.out.shape)
        outer_of, inner_of = (self._each, self._lanes) if across else (self._lanes, self._each)
        left = x._replace(shape=x.shape[:kept], strides=x.strides[:kept])
        rest = x._replace(shape=x.shape[kept:], strides=x.strides[kept:])
        outer, inner = outer_of(left.shape, [node.out, left]), inner_of(rest.shape, [rest])
        outer.steps[x], inner.steps[x] = outer.steps[left], inner.steps[rest]
        all, mask = self.name("all"), outer.mask or inner.mask
        entry = f"{all}_x = {self._load(x, outer, inner)}.to(tl.{kind})"
        one = f"({joined.format(all, f'{all}_x')}).to(tl.{kind})"
        shape = "(LANES,)" if mask else "()"
        lines = [f"{all} = tl.full({shape}, {number(begin, node.dtype)}, tl.{kind})"]
        lines += inner.around(
            [entry, f"{all} = tl.where({mask}, {one}, {all})" if mask else f"{all} = {one}"]
        )
        result = f"tl.reduce({all}, 0, {join})" if inner.mask else all
        lines.append(f"{all}_end = {result}")
        last = end.format(f"{all}_end", n=self._integer(count))
        lines.append(f"{all}_out = ({last}).to(tl.{word(node.out.dtype)})")
        return outer.around([*lines, self._store(node.out, f"{all}_out", outer)])

    def _norm(self, node: VectorNode) -> list[str]:
        x = node.given[0]
        assert isinstance(x, Region)
        left = x._replace(shape=x.shape[:-1], strides=x.strides[:-1])
        over = self._each(node.out.shape, [node.out, left])
        size, step = [self._integer(row[-1]) for row in (x.shape, x.strides)]
        all, power = self.name("all"), number(node.power, torch.float64)
        line = f"{all} = norm_in_range({self._at(left, over)[0]}, {size}, {step}, {power})"
        return over.around([line, self._store(node.out, all, over)])


def word(dtype: torch.dtype) -> str:
    """A dtype of entries in Triton."""
    return "int1" if dtype == torch.bool else str(dtype).removeprefix("torch.")


def stored_as(dtype: torch.dtype) -> str:
    """How entries of a dtype lie in memory: flags as bytes."""
    return "int8" if dtype == torch.bool else word(dtype)


def number(x: Number, dtype: torch.dtype) -> str:
    """A number of a dtype in Triton."""
    if dtype.is_floating_point:
        return repr(float(x)) if math.isfinite(x) else f'float("{x}")'
    return repr(bool(x) if dtype == torch.bool else int(x))


def operand(x: VectorOperand, known: dict[Region, str], dtype: torch.dtype) -> str:
    """An operand, as a node computes with it."""
    kind = f"tl.{word(dtype)}"
    if isinstance(x, Region):
        return known[x] if x.dtype == dtype else f"{known[x]}.to({kind})"
    return f"tl.full((), {number(x, dtype)}, {kind})"
