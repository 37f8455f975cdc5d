"""Programs in C++, for parameters on CPU: a call does all tensors of a bucket, on torch's threads.

Norms are added up in float64, in the pass that computes the values. kernel.h is what they
all include, and vector.h what the vector programs of a step do.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.norms import NAMED, SliceRows
from torchzero_clip.engines.compiled.printers.build import function
from torchzero_clip.engines.compiled.printers.language import ENDINGS, STORED, Language
from torchzero_clip.engines.compiled.printers.loops import Loop
from torchzero_clip.engines.compiled.printers.printer import LoopHeads, Printer, index_of
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.compiled.printers.vectors import Launched, Number, Region

Call = Callable[[Launch, Sequence[int]], "Tensor | None"]
"""call(launch, sizes): run it for the first `sizes` entries of each tensor; the statistics."""

SHARE = 2**15  # entries that are worth a thread
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat",
    torch.float16: "half",
    torch.bool: "bool",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "whole",
}
"""The C++ types of entries; arithmetic of lists is in float or double."""
VECTORS = (torch.float32, torch.float64, torch.bool, torch.int32)
"""The dtypes of vectors that lists meet."""


def literal(x: Number, dtype: torch.dtype) -> str:
    """A number of a dtype in C++."""
    if isinstance(x, float) and not math.isfinite(x):
        return '__builtin_nan("")' if math.isnan(x) else f"{'-' * (x < 0)}__builtin_inf()"
    return str(x).lower()  # as C++ has flags


CPP = Language(
    words=TYPES,
    stored=TYPES,
    given={
        "buffer": ("{1} *const buffer{0} = ({1} *)lists[{0}][tensor];", STORED),
        "number": ("numbers[{}]", (torch.float64,)),
        "vector": ("((const {1} *)vectors[{0}])[tensor]", VECTORS),
        "row": ("((const {1} *)vectors[{0}])[row]", VECTORS),
    },
    casts="{}({})",
    lets="const {} {} = {};",
    lib="list::",
    power="list::pow",
    number=literal,
    constant="{}({})",
    reads=dict.fromkeys(STORED, "load({})"),
    writes={dtype: f"stored<{TYPES[dtype]}>({{}})" for dtype in STORED},
    cut="cut({})",
    entry="{}[place]",
    stores="buffer{}[place] = {};",
    ratio="over_{}",
    divisor="const divisor over_{0}({0});",
    loop="for (whole {0} = 0; {0} < {1}; ++{0}) {{",
    end=("}",),
    begins="{0} {1} = {2};",
    joins="{1} = {2};",
)
"""What lists are written in; vectors, whose header has neither, are in `__builtin_` functions."""
SOURCE = """#include "kernel.h"

static void entries(int64_t tensor, int64_t row, int64_t at, int64_t end,
                    void *const *const *lists, const double *numbers, const void *const *vectors,
                    double *out) {{
    {constants}
    auto entry = [=](int64_t place) {{
        {lines}
    }};
    {loop}
}}

extern "C" void kernel(int64_t count, const int64_t *sizes, void *const *const *lists,
                       const double *numbers, const void *const *vectors, double *out,
                       int64_t threads, const int64_t *rows) {{
    share<{backward}>(entries, count, sizes, lists, numbers, vectors, out, threads, {rows});
}}
"""
VECTOR_SOURCE = """#include "vector.h"

extern "C" void kernel(void *const *p, const whole *d, whole begin, whole end) {{
    {lines}
}}
"""
EACH = """#pragma omp simd
    for (int64_t j = at; j < end; ++j) entry(j);"""
ADDED = """double total = 0;
    #pragma omp simd reduction(+: total)
    for (int64_t j = at; j < end; ++j) total += entry(j);
    *out = total;"""
LARGEST = """uint32_t largest = 0;
    #pragma omp simd reduction(max: largest)
    for (int64_t j = at; j < end; ++j) largest = larger(largest, entry(j));
    *out = number(largest);"""
MEASURED = {
    NAMED["l1"]: (ADDED, "magnitude"),
    NAMED["l2"]: (ADDED, "square"),
    NAMED["linf"]: (LARGEST, "order"),
    NAMED["sum"]: (ADDED, "double"),
}
"""For each measure the loop that adds it up, and the function of an entry that is added."""


def source(program: Program) -> str | None:
    """A program in C++, or None where it has dtypes or operators that only torch computes."""
    made, loop = CPP.entries(program), EACH
    if made is None:
        return None
    lines, constants = made.each, [*made.shared.values()]
    if program.measured is not None:
        loop, how = MEASURED[program.measured[0]]
        lines.append(f"return {how}(v{program.measured[1]});")
    return SOURCE.format(
        constants="\n    ".join(constants),
        lines="\n        ".join(lines),
        loop=loop,
        backward="true" if program.stores else "false",
        rows="rows" if program.rows else "nullptr",
    )


# ---------------------------------------------------------------------- vectors


class CppPrinter(Printer):
    """The turns of a step in C++: one library, which is told which of them to do."""

    language = replace(CPP, lib="__builtin_", reads={}, writes={})

    def text(self) -> str:
        """The source of a library whose kernel(p, d, begin, end) does these turns."""
        self._powers, body = list[str](), list[str]()
        for i, loops in enumerate(self.loops):
            lines = [line for loop in loops for line in self._loop(loop)]
            body += [f"if (begin <= {i} && {i} < end) {{", *lines, "}"]
        powers = [f"last_power {', '.join(self._powers)};"] * bool(self._powers)
        return VECTOR_SOURCE.format(lines="\n    ".join([*powers, *body]))

    def _loop(self, loop: Loop) -> list[str]:
        first = loop.nodes[0]
        return self._launch(first) if isinstance(first, Launched) else self.lines(loop)

    # ------------------------------------------------------------------ what the language says

    def integer(self, n: Any) -> str:
        return str(n) if n in (0, 1) else f"d[{index_of(self.integers, n)}]"

    def address(self, x: Region, *loops: LoopHeads) -> str:
        return f"&{self.load(x, *loops)}"

    def load(self, x: Region, *loops: LoopHeads) -> str:
        (row, terms), at = self.index(x, loops), self._pointer("memory", x.memory)
        at = f"((void *const *){at})[{row}]" if row else at
        return f"(({TYPES[x.dtype]} *){at})[{' + '.join(terms) or '0'}]"

    def store(self, x: Region, value: str, *loops: LoopHeads) -> str:
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
        names = "kernel", "sizes", "lists", "found"
        kernel, sizes, lists, found = [self._pointer(again, name) for name in names]
        count, width = self.integer(len(again.sizes)), self.integer(again.width)
        threads = f"d[{index_of(self.integers, (again, 'threads'))}]"
        rows = "0" if again.rows is None else self._pointer(again, "rows")
        out, kind = "0", 0
        if node.out is not None:
            out = self._pointer("memory", node.out.memory)
            kind = ENDINGS[again.program.measured[0]]  # type: ignore[index]
        given = [kernel, sizes, lists, "numbers", "vectors", found, threads, rows, width, out]
        return [
            "{",
            f"const double numbers[] = {{{', '.join(numbers) or '0'}}};",
            f"const void *const vectors[] = {{{', '.join(vectors) or '0'}}};",
            f"launch({count}, {', '.join(given)}, {kind});",
            "}",
        ]


# ---------------------------------------------------------------------- running


def kernel_of(program: Program) -> Any:
    """The function of a program's library, or None where there can be none."""
    text = source(program)
    kernel = None if text is None else function(text)
    if kernel is not None:
        kernel.argtypes = [ctypes.c_void_p] * 8
    return kernel


def threads_for(sizes: Sequence[int]) -> int:
    """How many threads share tensors of these sizes."""
    return max(1, min(torch.get_num_threads(), sum(sizes) // SHARE))


def rows_of(rows: SliceRows) -> array[int]:
    """Slices as kernels find them: how long those of a tensor are, the first, and how many."""
    ends = itertools.accumulate(rows.counts, initial=0)
    return array("q", [*rows.lengths, *ends])


@cache
def native(program: Program) -> Call | None:
    """A program as a call, or None where it cannot be one."""
    kernel = kernel_of(program)
    if kernel is None:
        return None

    def call(launch: Launch, sizes: Sequence[int]) -> Tensor | None:
        threads, out = threads_for(sizes), None
        tables: list[array[Any]] = [array("q", sizes)]
        tables.append(array("Q", [buffer.addresses.buffer_info()[0] for buffer in launch.buffers]))
        tables.append(array("d", launch.numbers))
        tables.append(array("Q", [vector.data_ptr() for vector in launch.vectors]))
        tables += [] if launch.rows is None else [rows_of(launch.rows)]
        if program.measured is not None:
            out = torch.zeros(threads, launch.width, dtype=torch.float64, device="cpu")
        starts = [table.buffer_info()[0] for table in tables]
        found = 0 if out is None else out.data_ptr()
        kernel(len(sizes), *starts[:4], found, threads, *starts[4:] or [0])
        if out is None:
            return None
        end = ENDINGS[program.measured[0]]  # type: ignore[index]
        total = out if threads == 1 else out.sum(dim=0) if end else out.amax(dim=0)
        return (total.sqrt_() if end == 2 else total).view(1, -1)

    return call
