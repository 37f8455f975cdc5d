"""C++ kernels for parameters on the CPU. One call of a kernel processes all tensors of a bucket.

A list program computes with lists of tensors. `source` prints a list program as C++ text, and
`native` returns a function that runs the compiled program. A vector program computes with a few
numbers between two launches. `CppPrinter` prints the vector programs of a step.

A kernel uses at most `torch.get_num_threads()` threads. It sums norms in float64, in the same pass
that computes the values. List programs include kernel.h. Vector programs include vector.h.
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
"""A function that runs a kernel: call(launch, sizes) uses the first sizes[i] elements of tensor i.

It returns the statistics, such as one norm per tensor, or None if the program measures nothing."""

ELEMENTS_PER_THREAD = 2**15  # with fewer elements, another thread costs more than it saves
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
"""The C++ type of each dtype in memory. List programs compute in float or double."""
VECTORS = (torch.float32, torch.float64, torch.bool, torch.int32)
"""The dtypes that vectors may have as operands of list programs."""


def literal(x: Number, dtype: torch.dtype) -> str:
    """Return a number as C++ text."""
    if not isinstance(x, float) or math.isfinite(x):
        return str(x).lower()  # C++ writes flags in lower case
    if math.isnan(x):
        return '__builtin_nan("")'
    return "-__builtin_inf()" if x < 0 else "__builtin_inf()"


CPP = Language(
    types=TYPES,
    stored_types=TYPES,
    inputs={
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
    divisor="const divisor over_{0}({0});",
    loop="for (whole {0} = 0; {0} < {1}; ++{0}) {{",
    end=("}",),
    begins="{0} {1} = {2};",
    joins="{1} = {2};",
)
"""The language of list programs. Vector programs use `__builtin_` functions, because vector.h has
no namespace `list`."""
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
ELEMENTWISE = """#pragma omp simd
    for (int64_t j = at; j < end; ++j) entry(j);"""
SUMMED = """double total = 0;
    #pragma omp simd reduction(+: total)
    for (int64_t j = at; j < end; ++j) total += entry(j);
    *out = total;"""
LARGEST = """uint32_t largest = 0;
    #pragma omp simd reduction(max: largest)
    for (int64_t j = at; j < end; ++j) largest = larger(largest, entry(j));
    *out = number(largest);"""
MEASURED = {
    NAMED["l1"]: (SUMMED, "magnitude"),
    NAMED["l2"]: (SUMMED, "square"),
    NAMED["linf"]: (LARGEST, "order"),
    NAMED["sum"]: (SUMMED, "double"),
}
"""For each measure: the loop that computes it, and the function that is applied to each element."""


def source(program: Program) -> str | None:
    """Return a program as C++ text, or None if C++ lacks a dtype or operator of the program."""
    statements = CPP.statements(program)
    if statements is None:
        return None
    lines = statements.each
    loop = ELEMENTWISE
    if program.measured is not None:
        measure, value = program.measured
        loop, of_element = MEASURED[measure]
        lines.append(f"return {of_element}(v{value});")
    return SOURCE.format(
        constants="\n    ".join(statements.shared.values()),
        lines="\n        ".join(lines),
        loop=loop,
        backward="true" if program.stores else "false",
        rows="rows" if program.rows else "nullptr",
    )


# ---------------------------------------------------------------------- vectors


class CppPrinter(Printer):
    """A printer of one C++ library for all segments. A call of its kernel runs some segments."""

    language = replace(CPP, lib="__builtin_", reads={}, writes={})

    def text(self) -> str:
        """Return the source text of the library.

        The function kernel(p, d, begin, end) runs the segments from `begin` to `end - 1`.
        """
        self._powers = list[str]()
        body = list[str]()
        for i, loops in enumerate(self.loops):
            lines = [line for loop in loops for line in self._loop(loop)]
            body += [f"if (begin <= {i} && {i} < end) {{", *lines, "}"]
        if self._powers:
            body.insert(0, f"last_power {', '.join(self._powers)};")
        return VECTOR_SOURCE.format(lines="\n    ".join(body))

    def _loop(self, loop: Loop) -> list[str]:
        first = loop.nodes[0]
        return self._launch(first) if isinstance(first, Launched) else self.lines(loop)

    # ------------------------------------------------------------------ texts of the language

    def integer(self, n: Any) -> str:
        return str(n) if n in (0, 1) else f"d[{index_of(self.integers, n)}]"

    def address(self, x: Region, *loops: LoopHeads) -> str:
        return f"&{self.load(x, *loops)}"

    def load(self, x: Region, *loops: LoopHeads) -> str:
        row, terms = self.index(x, loops)
        start = self._pointer("memory", x.memory)
        if row:
            start = f"((void *const *){start})[{row}]"
        return f"(({TYPES[x.dtype]} *){start})[{' + '.join(terms) or '0'}]"

    def store(self, x: Region, value: str, *loops: LoopHeads) -> str:
        return f"{self.load(x, *loops)} = {value};"

    def language_at(self, name: str) -> Language:
        """Return the language in which an operator is printed.

        Each power gets a separate `last_power` object, which stores the last result.
        """
        if name != "pow":
            return self.language
        self._powers.append(f"power{len(self._powers)}")
        return replace(self.language, power=self._powers[-1])

    def _pointer(self, *key: Any) -> str:
        return f"p[{index_of(self.pointers, key)}]"

    # ------------------------------------------------------------------ launches

    def _launch(self, node: Launched) -> list[str]:
        """Return statements that call a list kernel, with numbers from the memory of vectors."""
        numbers = [
            f"double({self.load(x)})" if isinstance(x, Region) else CPP.number(x, torch.float64)
            for x in node.numbers
        ]
        vectors = [self.address(x.of(())) for x in node.vectors]
        relaunch = node.launch
        names = "kernel", "sizes", "lists", "found"
        kernel, sizes, lists, partial = [self._pointer(relaunch, name) for name in names]
        count = self.integer(len(relaunch.sizes))
        width = self.integer(relaunch.width)
        threads = f"d[{index_of(self.integers, (relaunch, 'threads'))}]"
        rows = "0" if relaunch.rows is None else self._pointer(relaunch, "rows")
        out = "0"
        ending = 0
        if node.out is not None:
            out = self._pointer("memory", node.out.memory)
            ending = ENDINGS[relaunch.program.measured[0]]  # type: ignore[index]
        arguments = [kernel, sizes, lists, "numbers", "vectors", partial, threads, rows, width, out]
        return [
            "{",
            f"const double numbers[] = {{{', '.join(numbers) or '0'}}};",
            f"const void *const vectors[] = {{{', '.join(vectors) or '0'}}};",
            f"launch({count}, {', '.join(arguments)}, {ending});",
            "}",
        ]


# ---------------------------------------------------------------------- running


def kernel_of(program: Program) -> Any:
    """Compile a program and return the function, or None if the program has no kernel."""
    text = source(program)
    kernel = None if text is None else function(text)
    if kernel is not None:
        kernel.argtypes = [ctypes.c_void_p] * 8
    return kernel


def threads_for(sizes: Sequence[int]) -> int:
    """Return the number of threads for tensors of these sizes."""
    return max(1, min(torch.get_num_threads(), sum(sizes) // ELEMENTS_PER_THREAD))


def rows_of(rows: SliceRows) -> array[int]:
    """Return a table of slices for kernels.

    The table has the slice length of each tensor, then the index of the first slice of each tensor,
    and at the end the number of all slices.
    """
    ends = itertools.accumulate(rows.counts, initial=0)
    return array("q", [*rows.lengths, *ends])


@cache
def native(program: Program) -> Call | None:
    """Return a function that runs the kernel of a program, or None if there is no kernel."""
    kernel = kernel_of(program)
    if kernel is None:
        return None

    def call(launch: Launch, sizes: Sequence[int]) -> Tensor | None:
        threads = threads_for(sizes)
        tables: list[array[Any]] = [
            array("q", sizes),
            array("Q", [buffer.addresses.buffer_info()[0] for buffer in launch.buffers]),
            array("d", launch.numbers),
            array("Q", [vector.data_ptr() for vector in launch.vectors]),
        ]
        rows = None if launch.rows is None else rows_of(launch.rows)
        rows_address = 0 if rows is None else rows.buffer_info()[0]
        addresses = [table.buffer_info()[0] for table in tables]
        if program.measured is None:
            kernel(len(sizes), *addresses, 0, threads, rows_address)
            return None
        partial = torch.zeros(threads, launch.width, dtype=torch.float64, device="cpu")
        kernel(len(sizes), *addresses, partial.data_ptr(), threads, rows_address)
        ending = ENDINGS[program.measured[0]]
        if threads == 1:
            total = partial
        else:
            total = partial.sum(dim=0) if ending else partial.amax(dim=0)
        return (total.sqrt_() if ending == 2 else total).view(1, -1)

    return call
