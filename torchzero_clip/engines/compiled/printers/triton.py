"""Programs in Triton, for parameters on CUDA: one launch does all tensors of a bucket.

A kernel takes a table of addresses and one that gives each of its programs a tensor and where to
begin, so that it is compiled once whatever the tensors are. Norms are added up in the pass that
computes the values. Of vectors a kernel of one program does all nodes between two launches: entries
go by as many as there are lanes, and what one loop writes and another reads lies in memory, with a
barrier between them. kernel.py is what all kernels include.
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
"""For each measure what a block adds to the statistic of its chunk."""
ADDED = "total = tl.full((), 0.0, tl.float64)", "total += {}", "total"
LARGEST = (
    "total = tl.full((), 0, tl.int32)",
    "total = tl.maximum(total, {})",
    "total.to(tl.float32, bitcast=True).to(tl.float64)",
)
"""Where the statistic of a chunk begins, how a block joins it, and it as a number."""
BUFFER = """buffer{0} = tl.load(addresses + {0} * count + tensor){1} + at
    buffer{0} = tl.multiple_of(buffer{0}, {2}) if ALIGNED else buffer{0}"""
"""Where a list begins in a chunk; all are read as many entries at a time, as few as the widest
dtype has in 16 bytes: others would be brought into its order through shared memory."""
TENSORS = """tensor = tl.load(chunks + 2 * program)
    at, left = part_of(tl.load(layout + tensor), tl.load(chunks + 2 * program + 1), CHUNK)"""
"""Where the chunk of a tensor begins, and how many entries are left there."""
ROWS = """row = tl.load(chunks + 2 * program)
    at, left = part_of(tl.load(layout + row), tl.load(chunks + 2 * program + 1), ROW)
    tensor = tl.load(layout + 2 * width + row).to(tl.int32)
    at += tl.load(layout + 3 * width + row)"""
"""The same of a slice."""
ALONE = """if alone != 0:
        tl.store(parts + {one}, {last})
    else:
        tl.store(parts + program, {total})"""
"""What is left of a chunk: the statistic, where a tensor or slice is a single one."""
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
"""What is done with some entries of a chunk."""
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


WORDS = {dtype: str(dtype).removeprefix("torch.") for dtype in POINTERS} | {torch.bool: "int1"}
STORED_AS = WORDS | {torch.bfloat16: "uint16", torch.bool: "int8"}
"""How entries lie in memory: bfloat16 as its bits, flags as bytes."""
ADDRESSES = {dtype: f".to(tl.pointer_type(tl.{kind}))" for dtype, kind in STORED_AS.items()}
"""What makes an address of entries of a number."""


def number(x: Number, dtype: torch.dtype) -> str:
    """A number of a dtype."""
    if dtype.is_floating_point:
        return repr(float(x)) if math.isfinite(x) else f'float("{x}")'
    return repr(bool(x) if dtype == torch.bool else int(x))


TRITON = Language(
    words=WORDS,
    stored=ADDRESSES,
    given={
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
    ratio="over_{}",
    divisor="over_{0} = divisor({0})",
    double=True,
    loop="for {0} in range(0, {1}):",
    end=(),
    begins="{1} = tl.full({3}, {2}, tl.{0})",
    joins="{1} = tl.where({3}, ({2}).to(tl.{0}), {1})",
    lanes="tl.reduce({0}, 0, {1})",
    lacks=[("pow", torch.float64)],  # what there is is right in float32
)


@cache
def here() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def source(program: Program) -> str | None:
    """A program in Triton, or None where it has dtypes or operators that only torch computes."""
    made = TRITON.entries(program)
    if made is None:
        return None
    lines, given = made.each, "".join([f"{name}, " for name in made.shared])
    call = f"entries({given}lane, at, left, "
    begin, added, end = "", "{}", "return"
    if program.measured is not None:
        measure, value = program.measured
        lines.append(f"entry = v{value}.to(tl.float32)")
        lines.append("entry = entry if FULL else tl.where(mask, entry, 0.0)")
        lines.append(f"return {MEASURED[measure].format('entry')}")
        begin, added, total = ADDED if ENDINGS[measure] else LARGEST
        last = f"root({total})" if ENDINGS[measure] == 2 else total
        end = ALONE.format(one="row" if program.rows else "tensor", last=last, total=total)
    before = BEFORE.format(given=given, lines="\n    ".join(lines))
    body = BODY.format(
        where=ROWS if program.rows else TENSORS,
        shared="\n    ".join([*made.shared.values(), begin]),
        full=added.format(f"{call}True)"),
        rest=added.format(f"{call}False)"),
        end=end,
    )
    does = [x for x, _ in program.nodes if x != "load"] + ["measure"] * bool(program.measured)
    return page(does, signature(program), body, before, ", ALIGNED: tl.constexpr")


def page(
    does: list[str], names: Mapping[str, str], body: str, before: str = "", last: str = ""
) -> str:
    """A page with a kernel, of arguments and their types; profilers call it by what it does."""
    arguments = ", ".join([f'{name}: "{kind}"' for name, kind in names.items()]) + last
    title = "_".join(["torchzero_clip", *dict.fromkeys(does)])[:64]
    return PAGE.format(before=before, names=[*names], arguments=arguments, body=body, title=title)


def signature(program: Program) -> dict[str, str]:
    """The arguments of a kernel and their types; ALIGNED comes behind them."""
    names = {"addresses": "*i64", "layout": "*i64", "chunks": "*i32", "count": "i32"}
    names |= {"skip": "i32", "width": "i32"} if program.rows else {"skip": "i32"}
    names |= {"numbers": "*fp64"}
    names |= {f"vectors{i}": POINTERS[dtype] for i, dtype in enumerate(program.vectors)}
    names |= {f"scalars{i}": POINTERS[dtype] for i, dtype in enumerate(program.scalars)}
    return names if program.measured is None else names | {"parts": "*fp64", "alone": "i32"}


# ---------------------------------------------------------------------- vectors


class VectorKernel(NamedTuple):
    """A kernel.

    Attributes:
        text: Its page.
        signature: Its arguments and their types.
        sources: The memories that it is given, which are others in every step.
        words: The table that it looks the rest up in: a whole number, or a memory and which of its
            entries, whose address it is. It has one where nothing is looked up: of none there is no
            table.
    """

    text: str
    signature: dict[str, str]
    sources: list[int]
    words: list[int | tuple[int, int]]


class TritonPrinter(Printer):
    """The kernels of a step in Triton."""

    language = TRITON

    def kernel(self, loops: Sequence[Loop]) -> VectorKernel:
        """The kernel of some loops in a row."""
        self.pointers, self.integers, self._count = list[int](), list[int](), 0
        self._head, body = list[str](), list[str]()
        for loop in loops:
            body += ["tl.debug_barrier()"] * bool(body)
            body += self.lines(loop)
        words: list[int | tuple[int, int]] = [*[(m, 0) for m in self.pointers], *self.integers]
        head = list(dict.fromkeys(self._head))
        for i, m in enumerate(self.pointers):
            if self.memories[m].rows:
                head.append(f"m{i} = p + {len(words)}")
                words += self.memories[m].rows
        changing = [(i, m) for i, m in enumerate(self.pointers) if self.memories[m].changes]
        kinds = {f"s{i}": POINTERS[self.memories[m].dtype] for i, m in changing}
        signature = {"p": "*i64", **kinds}
        first = [f"d = p + {len(self.pointers)}", "lane = tl.arange(0, LANES)"]
        text = page(["vectors"], signature, "\n    ".join([*first, *head, *body]))
        return VectorKernel(text, signature, [m for _, m in changing], words or [0])

    # ------------------------------------------------------------------ what the language says

    def integer(self, n: Any) -> str:
        if n in (0, 1):
            return str(n)
        where = index_of(self.integers, n)
        self._head.append(f"n{where} = tl.load(d + {where})")
        return f"n{where}"

    def lanes(self, shape: Sequence[int], regions: Sequence[Region]) -> LoopHeads:
        dims = self.dims(shape, regions)
        if not dims:  # a single entry
            return self.each(shape, regions)
        i, size = self.name("i"), " * ".join([self.integer(n) for n, _ in dims])
        head, mask = f"for {i}_0 in range(0, {size}, LANES):", f"{i}_mask"
        inside = [f"{i} = {i}_0 + lane.to(tl.int64)", f"{mask} = {i} < {size}"]
        names = list[str]()
        for k, (n, _) in enumerate(reversed(dims[1:])):
            inside.append(f"{i}_{k + 1} = {i} % {self.integer(n)}")
            names.append(f"{i}_{k + 1}")
            inside.append(f"{i} = {i} // {self.integer(n)}")
        return LoopHeads([head], inside, steps_of(regions, dims, [i, *reversed(names)]), mask)

    def _memory(self, x: Region) -> str:
        """The address of a memory; of rows that of a table of addresses."""
        where = index_of(self.pointers, x.memory)
        if not self.in_rows(x):
            changes = self.memories[x.memory].changes
            value = f"s{where}" if changes else f"tl.load(p + {where})"
            self._head.append(f"m{where} = {value}{ADDRESSES[x.dtype]}")
        return f"m{where}"

    def _at(self, x: Region, *loops: LoopHeads) -> tuple[str, str]:
        """The address of an entry, and the argument of a mask where lanes look at several."""
        at, (row, terms) = self._memory(x), self.index(x, loops)
        mask = next((f", mask={some.mask}" for some in loops if some.mask), "")
        if row:
            at = f"tl.load({at} + {row}{mask}{', other=0' * bool(mask)}){ADDRESSES[x.dtype]}"
        elif not any([step for some in loops if some.mask for _, step in some.steps[x]]):
            mask = ""
        return " + ".join([at, *terms]), mask

    def address(self, x: Region, *loops: LoopHeads) -> str:
        return self._at(x, *loops)[0]

    def load(self, x: Region, *loops: LoopHeads) -> str:
        at, mask = self._at(x, *loops)
        return TRITON.read(f"tl.load({at}{mask}{', other=0' * bool(mask)})", x.dtype)

    def store(self, x: Region, value: str, *loops: LoopHeads) -> str:
        at, _ = self._at(x, *loops)
        mask = "".join([f", mask={some.mask}" for some in loops if some.mask])
        return f"tl.store({at}, {TRITON.written(value, x.dtype)}{mask})"


# ---------------------------------------------------------------------- running


class TritonCall:
    """A program as a call: all tensors in one launch, and another for those at odd addresses."""

    def __init__(self, program: Program, text: str) -> None:
        self.program, self.kernel = program, TritonKernel("program", text, signature(program))

    def __call__(
        self, given: Launch, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor | None:
        """Run it for the first `sizes` entries of each tensor; returns the statistics, in `out`."""
        count, like = len(sizes), given.buffers[0].tensors[0]
        (addresses, by), width = TABLES.table(given.buffers, sizes, given.rows), given.width
        numbers = TABLES.numbers(given.numbers or [0.0], like)
        parts, measured = list[Any](), self.program.measured
        if measured is not None:
            out = like.new_empty(1, width, dtype=torch.float64) if out is None else out
            wide = out if by.alone else out.new_empty(max(by.total, 1))
            parts = [wide, int(by.alone)]
        rest = [*[width] * self.program.rows, numbers, *given.vectors, *given.scalars, *parts]
        for aligned, skip, programs in by.launches:
            launch(self.kernel, programs, addresses, *by[:2], count, skip, *rest, ALIGNED=aligned)
        if measured is not None and not by.alone:
            most = CHUNK if given.rows is None else ROW
            power = ENDINGS[measured[0]]
            launch(JOINED, width, parts[0], by.layout, width, out, most, POWER=power)
        return out


@cache
def native(program: Program) -> TritonCall | None:
    """A program as a call, or None where it cannot be one."""
    text = source(program)
    return None if text is None else TritonCall(program, text)
