"""Triton kernels for parameters on CUDA. One launch of a kernel processes all tensors of a bucket.

A list program computes with lists of tensors. `source` prints a list program as Triton text, and
`native` returns a function that runs the compiled program. `TritonPrinter` prints the vector
programs of a step. All kernels include triton_include.py.

A list kernel receives a table of addresses, and a table that assigns a chunk of a tensor to each
Triton program. So a kernel is compiled once for all shapes. The kernel sums norms in the same pass
that computes the values.

A vector kernel is a single Triton program that runs all nodes between two launches. It processes
several elements at the same time, one in each lane. If one loop writes values that another loop
reads, the values are in memory, and there is a barrier between the two loops.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.norms import NAMED
from torchzero_clip.engines.compiled.printers.language import ENDINGS, STORED, Language
from torchzero_clip.engines.compiled.printers.launches import JOINED, POINTERS, TritonKernel, launch
from torchzero_clip.engines.compiled.printers.loops import Loop
from torchzero_clip.engines.compiled.printers.pointer_tables import CHUNK, ROW, TABLES
from torchzero_clip.engines.compiled.printers.printer import LoopHeads, Printer, index_of, steps_of
from torchzero_clip.engines.compiled.printers.program import Launch, Program
from torchzero_clip.engines.compiled.printers.vectors import Number, Region

MEASURED = {
    NAMED["l1"]: "power_of({}, False)",
    NAMED["l2"]: "power_of({}, True)",
    NAMED["linf"]: "largest_of({})",
    NAMED["sum"]: "tl.sum({}.to(tl.float64), axis=0)",
}
"""For each measure: the text that computes the statistic of one block of elements."""
SUMMED = "total = tl.full((), 0.0, tl.float64)", "total += {}", "total"
LARGEST = (
    "total = tl.full((), 0, tl.int32)",
    "total = tl.maximum(total, {})",
    "total.to(tl.float32, bitcast=True).to(tl.float64)",
)
"""The statistic of a chunk: the start value, how a block is added, and the result as float64."""
BUFFER = """buffer{0} = tl.load(addresses + {0} * count + tensor){1} + at
    buffer{0} = tl.multiple_of(buffer{0}, {2}) if ALIGNED else buffer{0}"""
"""The address of a chunk in a buffer. A kernel reads the same number of elements at a time from all
buffers: the number that fits into 16 bytes in the widest dtype. With different numbers, Triton
would reorder elements through shared memory."""
TENSORS = """tensor = tl.load(chunks + 2 * program)
    at, left = part_of(tl.load(layout + tensor), tl.load(chunks + 2 * program + 1), CHUNK)"""
"""The first element of a tensor's chunk, and the number of elements in the chunk."""
ROWS = """row = tl.load(chunks + 2 * program)
    at, left = part_of(tl.load(layout + row), tl.load(chunks + 2 * program + 1), ROW)
    tensor = tl.load(layout + 2 * width + row).to(tl.int32)
    at += tl.load(layout + 3 * width + row)"""
"""The first element of a slice's chunk, and the number of elements in the chunk."""
ALONE = """if alone != 0:
        tl.store(parts + {one}, {last})
    else:
        tl.store(parts + program, {total})"""
"""Store the statistic of a chunk. If each tensor or slice is a single chunk, it is the result."""
PAGE = """import triton
import triton.language as tl

from torchzero_clip.engines.compiled.printers.triton_include import *

{before}
@triton.jit(do_not_specialize={names}, repr=lambda _: "{title}")
def kernel({arguments}):
    {body}
"""
BEFORE = """
@triton.jit
def entries({given}lane, at, left, FULL: tl.constexpr):
    mask = None if FULL else lane < left
    other = None if FULL else 0
    place = at.to(tl.uint32) + lane.to(tl.uint32)
    {lines}

"""
"""A function that computes one block of a chunk."""
BODY = """program = tl.program_id(0) + skip
    {where}
    {shared}
    for start in range(0, left, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        if start + BLOCK <= left:  # without a mask, so that loads are 128 bits wide
            {full}
        else:
            {rest}
    {end}"""


TYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in POINTERS} | {torch.bool: "int1"}
STORED_TYPES = TYPES | {torch.bfloat16: "uint16", torch.bool: "int8"}
"""The types of elements in memory: bfloat16 is stored as its bits, and flags as bytes."""
ADDRESSES = {dtype: f".to(tl.pointer_type(tl.{kind}))" for dtype, kind in STORED_TYPES.items()}
"""For each dtype, the text that casts an integer to the address of an element."""
MASKED_LOAD = ", other=0"  # masked lanes of a load read 0


def number(x: Number, dtype: torch.dtype) -> str:
    """Return a number as Triton text."""
    if dtype.is_floating_point:
        return repr(float(x)) if math.isfinite(x) else f'float("{x}")'
    return repr(bool(x) if dtype == torch.bool else int(x))


TRITON = Language(
    types=TYPES,
    stored_types=ADDRESSES,
    inputs={
        "buffer": (BUFFER, STORED),
        "number": ("tl.load(numbers + {})", POINTERS),
        "vector": ("tl.load(vectors{} + tensor)", POINTERS),
        "row": ("tl.load(vectors{} + row)", POINTERS),
        "scalar": ("tl.load(scalars{})", POINTERS),
    },
    casts="{1}.to(tl.{0})",
    lets="{1} = ({2}).to(tl.{0})",
    lib="tl.",
    power="power",
    number=number,
    constant="tl.full((), {1}, tl.{0})",
    reads={
        torch.bfloat16: "widened({})",
        **dict.fromkeys((torch.float16, torch.int16), "{}.to(tl.float32)"),
        torch.bool: "({} != 0)",
    },
    writes={
        torch.bfloat16: "narrowed({}.to(tl.float32))",
        torch.float16: "{}.to(tl.float32).to(tl.float16)",
        torch.bool: "({} != 0).to(tl.int8)",
    },
    cut="(bits_of({}) >> 16).to(tl.uint16)",
    entry="tl.load({} + lane, mask=mask, other=other)",
    stores="tl.store(buffer{} + lane, {}, mask=mask)",
    divisor="over_{0} = divisor({0})",
    double=True,
    loop="for {0} in range(0, {1}):",
    end=(),
    begins="{1} = tl.full({3}, {2}, tl.{0})",
    joins="{1} = tl.where({3}, ({2}).to(tl.{0}), {1})",
    lanes="tl.reduce({0}, 0, {1})",
    lacks=[("pow", torch.float64)],  # `power` is accurate to float32 only
)


@cache
def here() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def source(program: Program) -> str | None:
    """Return a program as Triton text, or None if Triton lacks one of its dtypes or operators."""
    statements = TRITON.statements(program)
    if statements is None:
        return None
    lines = statements.each
    shared = "".join([f"{name}, " for name in statements.shared])
    call = f"entries({shared}lane, at, left, "
    names = [name for name, _ in program.nodes if name != "load"]
    begin = ""
    join = "{}"
    end = "return"
    if program.measured is not None:
        measure, value = program.measured
        names.append("measure")
        lines.append(f"entry = v{value}.to(tl.float32)")
        lines.append("entry = entry if FULL else tl.where(mask, entry, 0.0)")
        lines.append(f"return {MEASURED[measure].format('entry')}")
        begin, join, total = SUMMED if ENDINGS[measure] else LARGEST
        last = f"root({total})" if ENDINGS[measure] == 2 else total
        end = ALONE.format(one="row" if program.rows else "tensor", last=last, total=total)
    before = BEFORE.format(given=shared, lines="\n    ".join(lines))
    body = BODY.format(
        where=ROWS if program.rows else TENSORS,
        shared="\n    ".join([*statements.shared.values(), begin]),
        full=join.format(f"{call}True)"),
        rest=join.format(f"{call}False)"),
        end=end,
    )
    return page(names, signature(program), body, before, ", ALIGNED: tl.constexpr")


def page(
    operators: list[str],
    parameters: Mapping[str, str],
    body: str,
    before: str = "",
    last: str = "",
) -> str:
    """Return the source text of a kernel. `parameters` has the type of each parameter.

    Profilers show the kernel under a title that lists `operators`.
    """
    arguments = ", ".join([f'{name}: "{kind}"' for name, kind in parameters.items()]) + last
    title = "_".join(["torchzero_clip", *dict.fromkeys(operators)])[:64]
    return PAGE.format(
        before=before, names=[*parameters], arguments=arguments, body=body, title=title
    )


def signature(program: Program) -> dict[str, str]:
    """Return the type of each parameter of a list kernel, except the last parameter ALIGNED."""
    types = {"addresses": "*i64", "layout": "*i64", "chunks": "*i32", "count": "i32", "skip": "i32"}
    if program.rows:
        types["width"] = "i32"
    types["numbers"] = "*fp64"
    types |= {f"vectors{i}": POINTERS[dtype] for i, dtype in enumerate(program.vectors)}
    types |= {f"scalars{i}": POINTERS[dtype] for i, dtype in enumerate(program.scalars)}
    if program.measured is not None:
        types |= {"parts": "*fp64", "alone": "i32"}
    return types


# ---------------------------------------------------------------------- vectors


class VectorKernel(NamedTuple):
    """A printed vector kernel.

    Attributes:
        text: The source text of the kernel.
        signature: The type of each parameter.
        sources: The indices of the memory blocks whose tensors are arguments, because each step
            uses other tensors.
        words: The table of all other addresses and integers that the kernel looks up. A pair
            (memory block, element) stands for the address of the element. The table has at least
            one entry, because an empty table cannot be sent.
    """

    text: str
    signature: dict[str, str]
    sources: list[int]
    words: list[int | tuple[int, int]]


class TritonPrinter(Printer):
    """A printer of the segments of a step, each as a separate Triton kernel."""

    language = TRITON

    def kernel(self, loops: Sequence[Loop]) -> VectorKernel:
        """Print consecutive loops as one kernel, and return the kernel."""
        self.pointers = list[int]()
        self.integers = list[int]()
        self._count = 0
        self._head = list[str]()  # statements before the loops
        body = list[str]()
        for loop in loops:
            if body:
                body.append("tl.debug_barrier()")
            body += self.lines(loop)
        words: list[int | tuple[int, int]] = [*[(m, 0) for m in self.pointers], *self.integers]
        head = list(dict.fromkeys(self._head))
        for i, m in enumerate(self.pointers):
            if self.memories[m].rows:
                head.append(f"m{i} = p + {len(words)}")
                words += self.memories[m].rows
        changing = [(i, m) for i, m in enumerate(self.pointers) if self.memories[m].changes]
        types = {f"s{i}": POINTERS[self.memories[m].dtype] for i, m in changing}
        parameters = {"p": "*i64", **types}
        first = [f"d = p + {len(self.pointers)}", "lane = tl.arange(0, LANES)"]
        text = page(["vectors"], parameters, "\n    ".join([*first, *head, *body]))
        return VectorKernel(text, parameters, [m for _, m in changing], words or [0])

    # ------------------------------------------------------------------ texts of the language

    def integer(self, n: Any) -> str:
        if n in (0, 1):
            return str(n)
        index = index_of(self.integers, n)
        self._head.append(f"n{index} = tl.load(d + {index})")
        return f"n{index}"

    def lanes(self, shape: Sequence[int], regions: Sequence[Region]) -> LoopHeads:
        dims = self.dims(shape, regions)
        if not dims:  # the region is a single element
            return self.each(shape, regions)
        i = self.name("i")
        size = " * ".join([self.integer(n) for n, _ in dims])
        head = f"for {i}_0 in range(0, {size}, LANES):"
        mask = f"{i}_mask"
        inside = [f"{i} = {i}_0 + lane.to(tl.int64)", f"{mask} = {i} < {size}"]
        names = list[str]()
        for k, (n, _) in enumerate(reversed(dims[1:])):
            inside.append(f"{i}_{k + 1} = {i} % {self.integer(n)}")
            names.append(f"{i}_{k + 1}")
            inside.append(f"{i} = {i} // {self.integer(n)}")
        return LoopHeads([head], inside, steps_of(regions, dims, [i, *reversed(names)]), mask)

    def _memory(self, x: Region) -> str:
        """Return the name of the variable with the address of a region's memory block.

        If the block has rows, the variable has the address of a table of addresses.
        """
        index = index_of(self.pointers, x.memory)
        if not self.in_rows(x):
            changes = self.memories[x.memory].changes
            value = f"s{index}" if changes else f"tl.load(p + {index})"
            self._head.append(f"m{index} = {value}{ADDRESSES[x.dtype]}")
        return f"m{index}"

    def _at(self, x: Region, *loops: LoopHeads) -> tuple[str, str]:
        """Return the address of an element and the mask of the load or store, both as text.

        The mask is empty if all lanes use the same element.
        """
        at = self._memory(x)
        row, terms = self.index(x, loops)
        masked = [heads for heads in loops if heads.mask]
        mask = f", mask={masked[0].mask}" if masked else ""
        if row:
            other = MASKED_LOAD if mask else ""
            at = f"tl.load({at} + {row}{mask}{other}){ADDRESSES[x.dtype]}"
        elif not any([step for heads in masked for _, step in heads.steps[x]]):
            mask = ""
        return " + ".join([at, *terms]), mask

    def address(self, x: Region, *loops: LoopHeads) -> str:
        return self._at(x, *loops)[0]

    def load(self, x: Region, *loops: LoopHeads) -> str:
        at, mask = self._at(x, *loops)
        other = MASKED_LOAD if mask else ""
        return TRITON.read(f"tl.load({at}{mask}{other})", x.dtype)

    def store(self, x: Region, value: str, *loops: LoopHeads) -> str:
        at, _ = self._at(x, *loops)
        mask = "".join([f", mask={heads.mask}" for heads in loops if heads.mask])
        return f"tl.store({at}, {TRITON.written(value, x.dtype)}{mask})"


# ---------------------------------------------------------------------- running


class TritonCall:
    """A function that runs the launches of a program.

    Tensors at aligned addresses share one kernel launch. The other tensors share a second launch.
    """

    def __init__(self, program: Program, text: str) -> None:
        self.program = program
        self.kernel = TritonKernel("program", text, signature(program))

    def __call__(
        self, operands: Launch, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor | None:
        """Run a launch on the first sizes[i] elements of tensor i, and return the statistics.

        If `out` is given, the statistics are written to it.
        """
        like = operands.buffers[0].tensors[0]
        width = operands.width
        addresses, grid = TABLES.table(operands.buffers, sizes, operands.rows)
        numbers = TABLES.numbers(operands.numbers or [0.0], like)
        rest: list[Any] = [numbers, *operands.vectors, *operands.scalars]
        if self.program.rows:
            rest.insert(0, width)
        parts = out
        measured = self.program.measured
        if measured is not None:
            if out is None:
                out = like.new_empty(1, width, dtype=torch.float64)
            parts = out if grid.alone else out.new_empty(max(grid.total, 1))
            rest += [parts, int(grid.alone)]
        tables = addresses, grid.layout, grid.chunks
        for aligned, skip, programs in grid.launches:
            launch(self.kernel, programs, *tables, len(sizes), skip, *rest, ALIGNED=aligned)
        if measured is not None and not grid.alone:
            per_chunk = CHUNK if operands.rows is None else ROW
            ending = ENDINGS[measured[0]]
            launch(JOINED, width, parts, grid.layout, width, out, per_chunk, POWER=ending)
        return out


@cache
def native(program: Program) -> TritonCall | None:
    """Return a function that runs the kernel of a program, or None if there is no kernel."""
    text = source(program)
    return None if text is None else TritonCall(program, text)
