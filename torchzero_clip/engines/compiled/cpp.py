"""Programs in C++, for parameters on CPU: a call does all tensors of a bucket, on torch's threads.

Norms are added up in float64, in the pass that computes the values. kernel.h is what they
all include.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.norms import NAMED, Measure, SliceRows
from torchzero_clip.engines.compiled.build import function
from torchzero_clip.engines.compiled.operators import OPERATORS
from torchzero_clip.engines.compiled.program import Launch, NodeOperand, Program

Call = Callable[[Launch, Sequence[int]], "Tensor | None"]
"""call(launch, sizes): run it for the first `sizes` entries of each tensor; the statistics."""

SHARE = 2**15  # entries that are worth a thread
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat",
    torch.float16: "half",
    torch.bool: "bool",
}
"""The C++ types of the entries of buffers; arithmetic is in float or double."""
VECTORS = {torch.float32: "float", torch.float64: "double", torch.bool: "bool"}
VECTORS |= {torch.int32: "int32_t"}
SOURCE = """#include "kernel.h"

static void entries(int64_t tensor, int64_t row, int64_t at, int64_t end,
                    void *const *const *lists, const double *numbers, const void *const *vectors,
                    double *out) {{
    {constants}
    auto entry = [=](int64_t j) {{
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
EACH = """#pragma omp simd
    for (int64_t j = at; j < end; ++j) entry(j);"""
ADDED = """double total = 0;
    #pragma omp simd reduction(+: total)
    for (int64_t j = at; j < end; ++j) total += entry(j);
    *out = total;"""
LARGEST = """uint32_t largest = 0;
    #pragma omp simd reduction(max: largest)
    for (int64_t j = at; j < end; ++j) largest = std::max(largest, entry(j));
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
    if not (TYPES.keys() >= set(program.buffers) and VECTORS.keys() >= set(program.vectors)):
        return None
    values: list[str] = []  # their types
    lines: list[str] = []
    for name, operands in program.nodes:
        line = _line(program, name, operands, values)
        if line is None:
            return None
        lines.append(f"const {line[0]} v{len(values)} = {line[1]};")
        values.append(line[0])
    for i, value in program.stores:
        kept = program.nodes[value][0] == "round"
        how = "cut" if kept else f"stored<{TYPES[program.buffers[i]]}>"
        lines.append(f"x{i}[j] = {how}(v{value});")
    loop = EACH
    if program.measured is not None:
        loop, how = MEASURED[program.measured[0]]
        lines.append(f"return {how}(v{program.measured[1]});")
    constants = []
    for i, dtype in enumerate(program.buffers):
        constants.append(f"{TYPES[dtype]} *const x{i} = ({TYPES[dtype]} *)lists[{i}][tensor];")
    constants += [f"const double number{i} = numbers[{i}];" for i in range(program.numbers)]
    for i, dtype in enumerate(program.vectors):
        kind, name = VECTORS[dtype], "row" if i in program.of_rows else "vector"
        at = "row" if name == "row" else "tensor"
        constants.append(f"const {kind} {name}{i} = ((const {kind} *)vectors[{i}])[{at}];")
    ratios = [f"{x[0]}{x[1]}" for x in [row[1] for name, row in program.nodes if name == "over"]]
    constants += [f"const divisor over_{x}({x});" for x in dict.fromkeys(ratios)]
    return SOURCE.format(
        constants="\n    ".join(constants),
        lines="\n        ".join(lines),
        loop=loop,
        backward="true" if program.stores else "false",
        rows="rows" if program.rows else "nullptr",
    )


def _line(
    program: Program, name: str, operands: tuple[NodeOperand, ...], values: list[str]
) -> tuple[str, str] | None:
    """The type of a value and its expression."""
    if name == "load":
        i = operands[0][1]
        return _wide(TYPES[program.buffers[i]]), f"load(x{i}[j])"
    if name == "round":
        value, key, start, half = [which for _, which in operands]
        return "float", f"rounded<{half}>(v{value}, vector{key}, vector{start}, j)"
    first = values[operands[0][1]]
    if name == "over":
        (_, value), (kind, which) = operands
        return first, f"over(v{value}, over_{kind}{which})"
    if name == "to":
        to = TYPES.get(getattr(torch, operands[1][1].removeprefix("torch.")))
        if to is None:
            return None
        rounded = "v{}" if first == "bool" else f"load(stored<{to}>(v{{}}))"
        return _wide(to), rounded.format(operands[0][1])
    if first == "bool" and not OPERATORS[name].boolean:
        return None
    kinds = [values[which] for kind, which in operands if kind == "value"]
    computed = first if first == "bool" else "double" if "double" in kinds else "float"
    terms = []
    for place, (kind, which) in enumerate(operands):
        text = f"v{which}" if kind == "value" else f"{kind}{which}"
        flag = name == "where" and place == 1
        same = kind == "value" and values[which] == computed
        terms.append(text if flag or same else f"{computed}({text})")
    result = "bool" if OPERATORS[name].boolean else computed
    return result, OPERATORS[name].native.format(*terms, lib="std::", power="std::pow")


def _wide(kind: str) -> str:
    """The type that entries are computed in."""
    return kind if kind in ("double", "bool") else "float"


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


def ending(m: Measure) -> int | None:
    """How the parts of a statistic are joined: 0 for the largest, 1 for the sum, 2 for its root."""
    kind = m.p if m.kind == "power" else m.kind
    return {"max": 0, "sum": 1, 1.0: 1, 2.0: 2}.get(kind)


@cache
def native(program: Program) -> Call | None:
    """A program as a call, or None where it cannot be one."""
    kernel = kernel_of(program)
    if kernel is None:
        return None

    def call(launch: Launch, sizes: Sequence[int]) -> Tensor | None:
        count = len(sizes)
        threads = threads_for(sizes)
        lists = array("Q", [buffer.addresses.buffer_info()[0] for buffer in launch.buffers])
        lengths = array("q", sizes)
        numbers = array("d", launch.numbers)
        vectors = array("Q", [vector.data_ptr() for vector in launch.vectors])
        out = None
        if program.measured is not None:
            out = torch.zeros(threads, launch.width, dtype=torch.float64, device="cpu")
        rows = None if launch.rows is None else rows_of(launch.rows)
        kernel(
            count,
            lengths.buffer_info()[0],
            lists.buffer_info()[0],
            numbers.buffer_info()[0],
            vectors.buffer_info()[0],
            0 if out is None else out.data_ptr(),
            threads,
            0 if rows is None else rows.buffer_info()[0],
        )
        if out is None:
            return None
        end = ending(program.measured[0])  # type: ignore[index]
        total = out if threads == 1 else out.sum(dim=0) if end else out.amax(dim=0)
        return (total.sqrt_() if end == 2 else total).view(1, -1)

    return call
