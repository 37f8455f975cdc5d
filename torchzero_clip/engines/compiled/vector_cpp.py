"""Vector programs in C++."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from torchzero_clip.engines.compiled.arithmetic import ENTRIES, REDUCTIONS, TYPES
from torchzero_clip.engines.compiled.cpp import ending
from torchzero_clip.engines.compiled.loops import Loop
from torchzero_clip.engines.compiled.printer import Printer, index_of, nodes_of
from torchzero_clip.engines.compiled.vectors import (
    Launched,
    Number,
    Region,
    VectorMemory,
    VectorNode,
)


class CppPrinter(Printer):
    """The parts of a step in C++: one library, which is told the part."""

    def __init__(
        self,
        memories: Sequence[VectorMemory],
        parts: Sequence[Sequence[VectorNode | Launched]],
        kept: Collection[int],
    ) -> None:
        super().__init__(memories, parts, kept)
        self._powers = 0

    def text(self) -> str:
        """The source of a library whose kernel(p, d, part) does a part."""
        body = []
        for i, part in enumerate(self.loops):
            body += [f"if (part == {i}) {{", *[line for x in part for line in self._loop(x)], "}"]
        powers = ", ".join([f"power{i + 1}" for i in range(self._powers)])
        body = [f"last_power {powers};"] * bool(powers) + body
        lines = "\n    ".join(body)
        return (
            '#include "vector.h"\n\n'
            'extern "C" void kernel(void *const *p, const whole *d, whole part) {\n'
            f"    {lines}\n}}\n"
        )

    def _loop(self, loop: Loop) -> list[str]:
        first = loop.nodes[0]
        if isinstance(first, Launched):
            return self._launch(first)
        if loop.open:
            return self._entries(loop)
        return self._norm(first) if first.name == "norm" else self._reduction(first)

    # ------------------------------------------------------------------ entries

    def _entries(self, loop: Loop) -> list[str]:
        """The statements of all nodes for each entry."""
        places: list[Region] = []
        nodes = nodes_of(loop)
        for node in nodes:
            places += [x for x in (node.out, *node.given) if isinstance(x, Region)]
        places = list(dict.fromkeys(places))
        head, terms = self._over(loop.shape, places, "i")
        known: dict[Region, str] = {}
        lines = [head + "{"]
        for node in nodes:
            kind, given = TYPES[node.dtype], []
            for x in node.given:
                if isinstance(x, Region) and x not in known:
                    known[x] = self.name("x")
                    lines.append(f"const {TYPES[x.dtype]} {known[x]} = {terms[x]};")
                value = known[x] if isinstance(x, Region) else literal(x)
                given.append(f"{kind}({value})")
            power = self._power(node.name)
            result = ENTRIES[node.name].format(*given, lib="__builtin_", power=power)
            known[node.out], to = self.name("v"), TYPES[node.out.dtype]
            lines.append(f"const {to} {known[node.out]} = {to}({result});")
            if self.stored(node.out):
                lines.append(f"{terms[node.out]} = {known[node.out]};")
        return [*lines, "}"]

    def _power(self, name: str) -> str:
        """The object that takes powers at one place of the text."""
        self._powers += name == "pow"
        return f"power{self._powers}"

    def _over(
        self, shape: Sequence[int], places: Sequence[Region], letter: str, base: str | None = None
    ) -> tuple[str, dict[Region, str]]:
        """The heads of loops over a shape, and for each place the term of an entry.

        Regions begin at `base`, if given.
        """
        dims = self.dims(shape, places)
        head = ""
        for i, (n, _) in enumerate(dims):
            name, end = f"{letter}{i}", self.tables.integer(n)
            head += f"for (whole {name} = 0; {name} < {end}; ++{name}) "
        terms = {}
        for k, x in enumerate(places):
            each = [(f"{letter}{i}", steps[k]) for i, (_, steps) in enumerate(dims)]
            terms[x] = self._term(x, each, base)
        return head, terms

    def _term(self, x: Region, each: Sequence[tuple[str, int]], base: str | None) -> str:
        if not self.stored(x):
            return ""
        at = base or self.tables.pointer(("memory", x.memory))
        start = [self.tables.integer(x.start)] if x.start else []
        if self.in_rows(x):
            at, each = f"((void *const *){at})[{each[0][0]}]", each[1:]
        at = f"({base})" if base else f"(({TYPES[x.dtype]} *){at})"
        steps = [
            name if step == 1 else f"{name} * {self.tables.integer(step)}"
            for name, step in each
            if step
        ]
        return f"{at}[{' + '.join([*start, *steps]) or '0'}]"

    # ------------------------------------------------------------------ reductions

    def _reduction(self, node: VectorNode) -> list[str]:
        x = node.given[0]
        assert isinstance(x, Region)
        begin, joined, _, end = REDUCTIONS[node.name]
        kept, count = len(node.out.shape), len(x.shape)
        outer = x._replace(shape=x.shape[:kept], strides=x.strides[:kept])
        head, terms = self._over(node.out.shape, [node.out, outer], "i")
        inner = x._replace(shape=x.shape[kept:], strides=x.strides[kept:], start=0)
        within, steps = self._over(x.shape[kept:], [inner], "j", f"&{terms[outer]}")
        kind, n = TYPES[node.dtype], math.prod(x.shape[kept:count])
        at = steps[inner]
        last = end.format("all", n=self.tables.integer(n))
        out = TYPES[node.out.dtype]
        return [
            f"{head}{{",
            f"{kind} all = {literal(begin)};",
            f"{within}all = {joined.format('all', f'{kind}({at})')};",
            f"{terms[node.out]} = {out}({last});",
            "}",
        ]

    def _norm(self, node: VectorNode) -> list[str]:
        x = node.given[0]
        assert isinstance(x, Region)
        outer = x._replace(shape=x.shape[:-1], strides=x.strides[:-1])
        head, terms = self._over(node.out.shape, [node.out, outer], "i")
        size, step = [self.tables.integer(row[-1]) for row in (x.shape, x.strides)]
        value = f"norm_in_range(&{terms[outer]}, {size}, {step}, {literal(node.power)})"
        return [f"{head}{terms[node.out]} = {value};"]

    # ------------------------------------------------------------------ launches

    def _launch(self, node: Launched) -> list[str]:
        """A call of a list program, whose numbers are read where they lie."""
        t = self.tables
        numbers = [
            f"double({self._over((), [x], 'i')[1][x]})" if isinstance(x, Region) else literal(x)
            for x in node.numbers
        ]
        vectors = [f"&{self._over((), [x], 'i')[1][x]}" for x in _single(node.vectors)]
        again = node.launch
        parts = [t.pointer((again, name)) for name in ("kernel", "sizes", "lists", "parts")]
        count, width = t.integer(len(again.sizes)), t.integer(again.width)
        threads = f"d[{index_of(t.integers, (again, 'threads'))}]"
        rows = "0" if again.rows is None else t.pointer((again, "rows"))
        out, kind = "0", 0
        if node.out is not None:
            out = t.pointer(("memory", node.out.memory))
            kind = ending(again.program.measured[0])  # type: ignore[index, assignment]
        given = [*parts[:3], "numbers", "vectors", parts[3], threads, rows, width, out, str(kind)]
        return [
            "{",
            f"const double numbers[] = {{{', '.join(numbers) or '0'}}};",
            f"const void *const vectors[] = {{{', '.join(vectors) or '0'}}};",
            f"launch({count}, {', '.join(given)});",
            "}",
        ]


def _single(places: Sequence[Region]) -> list[Region]:
    """The first entries of places."""
    return [x._replace(shape=(), strides=()) for x in places]


def literal(x: Number) -> str:
    """A number in C++."""
    if isinstance(x, bool):
        return str(x).lower()
    if isinstance(x, float) and not math.isfinite(x):
        return '__builtin_nan("")' if math.isnan(x) else f"{'-' * (x < 0)}__builtin_inf()"
    return repr(x)
