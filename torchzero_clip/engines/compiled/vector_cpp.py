"""Vector programs in C++: one library for all parts of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from torchzero_clip.engines.compiled.cpp import CPP, TYPES
from torchzero_clip.engines.compiled.language import ENDINGS, Language
from torchzero_clip.engines.compiled.loops import Loop
from torchzero_clip.engines.compiled.printer import Over, Printer, index_of
from torchzero_clip.engines.compiled.vectors import Launched, Region

SOURCE = """#include "vector.h"

extern "C" void kernel(void *const *p, const whole *d, whole part) {{
    {lines}
}}
"""


class CppPrinter(Printer):
    """The parts of a step in C++: one library, which is told the part."""

    language = replace(CPP, lib="__builtin_", reads={}, writes={})

    def text(self) -> str:
        """The source of a library whose kernel(p, d, part) does a part."""
        self._powers, body = list[str](), list[str]()
        for i, part in enumerate(self.loops):
            body += [f"if (part == {i}) {{", *[line for x in part for line in self._loop(x)], "}"]
        powers = [f"last_power {', '.join(self._powers)};"] * bool(self._powers)
        return SOURCE.format(lines="\n    ".join([*powers, *body]))

    def _loop(self, loop: Loop) -> list[str]:
        first = loop.nodes[0]
        return self._launch(first) if isinstance(first, Launched) else self.lines(loop)

    # ------------------------------------------------------------------ what the language says

    def integer(self, n: Any) -> str:
        return str(n) if n in (0, 1) else f"d[{index_of(self.integers, n)}]"

    def address(self, x: Region, *loops: Over) -> str:
        return f"&{self.load(x, *loops)}"

    def load(self, x: Region, *loops: Over) -> str:
        (row, terms), at = self.index(x, loops), self._pointer("memory", x.memory)
        at = f"((void *const *){at})[{row}]" if row else at
        return f"(({TYPES[x.dtype]} *){at})[{' + '.join(terms) or '0'}]"

    def store(self, x: Region, value: str, *loops: Over) -> str:
        return f"{self.load(x, *loops)} = {value};"

    def words(self, name: str) -> Language:
        """Each power has an object of its own, which keeps the last one."""
        if name != "pow":
            return self.language
        self._powers.append(f"power{len(self._powers)}")
        return replace(self.language, power=self._powers[-1])

    def _pointer(self, *whose: Any) -> str:
        return f"p[{index_of(self.pointers, whose)}]"

    # ------------------------------------------------------------------ launches

    def _launch(self, node: Launched) -> list[str]:
        """A call of a list program, whose numbers are read where they lie."""
        numbers = [
            f"double({self.load(x)})" if isinstance(x, Region) else CPP.number(x, torch.float64)
            for x in node.numbers
        ]
        vectors = [self.address(x.of(())) for x in node.vectors]
        again = node.launch
        parts = [self._pointer(again, name) for name in ("kernel", "sizes", "lists", "parts")]
        count, width = self.integer(len(again.sizes)), self.integer(again.width)
        threads = f"d[{index_of(self.integers, (again, 'threads'))}]"
        rows = "0" if again.rows is None else self._pointer(again, "rows")
        out, kind = "0", 0
        if node.out is not None:
            out = self._pointer("memory", node.out.memory)
            kind = ENDINGS[again.program.measured[0]]  # type: ignore[index]
        given = [*parts[:3], "numbers", "vectors", parts[3], threads, rows, width, out, str(kind)]
        return [
            "{",
            f"const double numbers[] = {{{', '.join(numbers) or '0'}}};",
            f"const void *const vectors[] = {{{', '.join(vectors) or '0'}}};",
            f"launch({count}, {', '.join(given)});",
            "}",
        ]
