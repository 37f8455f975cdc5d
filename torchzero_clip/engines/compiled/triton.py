"""Programs in Triton, for parameters on CUDA: one launch does all tensors of a bucket.

A kernel takes a table of addresses and one that gives each of its programs a tensor and where to
begin, so that it is compiled once whatever the tensors are. Norms are added up in the pass that
computes the values. kernel.py is what all kernels include.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.norms import NAMED
from torchzero_clip.engines.compiled.language import ENDINGS, STORED, Language
from torchzero_clip.engines.compiled.launches import JOINED, POINTERS, TritonKernel, launch
from torchzero_clip.engines.compiled.program import Launch, Program
from torchzero_clip.engines.compiled.tables import CHUNK, ROW, TABLES
from torchzero_clip.engines.compiled.vectors import Number

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
BUFFER = """buffer{0} = tl.load(addresses + {0} * count + tensor).to(tl.pointer_type(tl.{1})) + at
    buffer{0} = tl.multiple_of(buffer{0}, 16) if ALIGNED else buffer{0}"""
TENSORS = """tensor = tl.load(chunks + 2 * program)
    at = tl.load(chunks + 2 * program + 1).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(layout + tensor) - at, CHUNK).to(tl.int32)"""
"""Where the chunk of a tensor begins, and how many entries are left there."""
ROWS = """row = tl.load(chunks + 2 * program)
    at = tl.load(chunks + 2 * program + 1).to(tl.int64) * ROW
    left = tl.minimum(tl.load(layout + row) - at, ROW).to(tl.int32)
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

from torchzero_clip.engines.compiled.kernel import *

{before}
@triton.jit(do_not_specialize={names})
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


def number(x: Number, dtype: torch.dtype) -> str:
    """A number of a dtype."""
    if dtype.is_floating_point:
        return repr(float(x)) if math.isfinite(x) else f'float("{x}")'
    return repr(bool(x) if dtype == torch.bool else int(x))


TRITON = Language(
    words=WORDS,
    stored=STORED_AS,
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
        torch.float16: "{}.to(tl.float32)",
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
    ratio="{}.to(tl.float64)",
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
    lines, call = made.each, f"entries({', '.join([*made.shared, 'lane', 'at', 'left'])}, "
    begin, added, end = "", "{}", "return"
    if program.measured is not None:
        measure, value = program.measured
        lines.append(f"entry = v{value}.to(tl.float32)")
        lines.append("entry = entry if FULL else tl.where(mask, entry, 0.0)")
        lines.append(f"return {MEASURED[measure].format('entry')}")
        begin, added, total = ADDED if ENDINGS[measure] else LARGEST
        last = f"root({total})" if ENDINGS[measure] == 2 else total
        end = ALONE.format(one="row" if program.rows else "tensor", last=last, total=total)
    before = BEFORE.format(
        given="".join([f"{name}, " for name in made.shared]), lines="\n    ".join(lines)
    )
    body = BODY.format(
        where=ROWS if program.rows else TENSORS,
        shared="\n    ".join([*made.shared.values(), begin]),
        full=added.format(f"{call}True)"),
        rest=added.format(f"{call}False)"),
        end=end,
    )
    return page(signature(program), body, before, ["ALIGNED: tl.constexpr"])


def page(
    names: Mapping[str, str], body: str, before: str = "", constants: Sequence[str] = ()
) -> str:
    """A page with a kernel, of arguments and their types."""
    arguments = ", ".join([*[f'{name}: "{kind}"' for name, kind in names.items()], *constants])
    return PAGE.format(before=before, names=[*names], arguments=arguments, body=body)


def signature(program: Program) -> dict[str, str]:
    """The arguments of a kernel and their types; ALIGNED comes behind them."""
    names = {"addresses": "*i64", "layout": "*i64", "chunks": "*i32", "count": "i32"}
    names |= {"skip": "i32", "width": "i32"} if program.rows else {"skip": "i32"}
    names |= {"numbers": "*fp64"}
    names |= {f"vectors{i}": POINTERS[dtype] for i, dtype in enumerate(program.vectors)}
    names |= {f"scalars{i}": POINTERS[dtype] for i, dtype in enumerate(program.scalars)}
    return names if program.measured is None else names | {"parts": "*fp64", "alone": "i32"}


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
        table, width = TABLES.table(given.buffers, sizes, given.rows), given.width
        numbers = TABLES.numbers(given.numbers or [0.0], like)
        parts, measured = list[Any](), self.program.measured
        if measured is not None:
            out = like.new_empty(1, width, dtype=torch.float64) if out is None else out
            wide = out if table.alone else out.new_empty(max(table.total, 1))
            parts = [wide, int(table.alone)]
        more = [width] * self.program.rows
        rest = [numbers, *given.vectors, *given.scalars, *parts]
        for aligned, skip, programs in table.launches:
            tables = table.addresses, table.layout, table.chunks
            launch(self.kernel, programs, *tables, count, skip, *more, *rest, ALIGNED=aligned)
        if measured is not None and not table.alone:
            most = CHUNK if given.rows is None else ROW
            given_ = parts[0], table.layout, width, out, most
            launch(JOINED, width, *given_, POWER=ENDINGS[measured[0]])
        return out


@cache
def native(program: Program) -> TritonCall | None:
    """A program as a call, or None where it cannot be one."""
    text = source(program)
    return None if text is None else TritonCall(program, text)
