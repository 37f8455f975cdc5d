"""Programs in Triton, for parameters on CUDA: one launch does all tensors of a bucket.

A kernel takes a table of addresses and one that gives each of its programs a tensor and where to
begin, so that it is compiled once whatever the tensors are. Norms are added up in the pass that
computes the values. kernel.py is what all kernels include.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.norms import NAMED
from torchzero_clip.engines.compiled.launches import JOINED, POINTERS, TritonKernel, launch
from torchzero_clip.engines.compiled.operators import IN_DOUBLE, OPERATORS
from torchzero_clip.engines.compiled.program import Launch, NodeOperand, Program
from torchzero_clip.engines.compiled.tables import CHUNK, ROW, TABLES, on

HOME = "torchzero_clip.engines.compiled.kernel"
TYPES = {
    torch.float32: ("float32", "{}", "{}.to(tl.float32)"),
    torch.float64: ("float64", "{}", "{}.to(tl.float64)"),
    torch.bfloat16: ("uint16", "widened({})", "narrowed({}.to(tl.float32))"),
    torch.float16: ("float16", "{}.to(tl.float32)", "{}.to(tl.float32).to(tl.float16)"),
    torch.bool: ("int8", "({} != 0)", "({} != 0).to(tl.int8)"),
}
"""How entries lie in memory, how they are read, and how they are written."""
CUT = "(bits_of({}) >> 16).to(tl.uint16)"
"""How numbers are written that were rounded to what bfloat16 has."""
WIDE = {torch.float64: "float64", torch.bool: "int1"}
"""The types that entries are computed in, where it is not float32."""
MEASURED = {
    NAMED["l1"]: ("power_of({}, False)", 1),
    NAMED["l2"]: ("power_of({}, True)", 2),
    NAMED["linf"]: ("largest_of({})", 0),
    NAMED["sum"]: ("tl.sum({}.to(tl.float64), axis=0)", 1),
}
"""For each measure what a block adds to the statistic of its chunk, and how chunks are joined."""
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
SOURCE = """import triton
import triton.language as tl

from {home} import *


@triton.jit
def entries({given}lane, at, left, FULL: tl.constexpr):
    mask = None if FULL else lane < left
    other = None if FULL else 0
    place = at.to(tl.uint32) + lane.to(tl.uint32)
    {lines}


@triton.jit(do_not_specialize={names})
def kernel({signature}, ALIGNED: tl.constexpr):
    program = tl.program_id(0) + skip
    {where}
    {constants}
    {begin}for start in range(0, left, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        if start + BLOCK <= left:  # without a mask, so that loads are 128 bits wide
            {full}
        else:
            {rest}
    {end}
"""


@cache
def here() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def source(program: Program) -> str | None:
    """A program in Triton, or None where it has dtypes or operators that only torch computes."""
    others = {*program.vectors, *program.scalars}
    if not (TYPES.keys() >= set(program.buffers) and POINTERS.keys() >= others):
        return None
    kinds: list[str] = []  # the types of values
    lines: list[str] = []
    for name, operands in program.nodes:
        line = _line(program, name, operands, kinds)
        if line is None:
            return None
        lines.append(f"v{len(kinds)} = {line[1]}")
        kinds.append(line[0])
    for i, value in program.stores:
        kept = program.nodes[value][0] == "round"
        way = CUT if kept else TYPES[program.buffers[i]][2]
        lines.append(f"tl.store(x{i} + lane, {way.format(f'v{value}')}, mask=mask)")
    constants, given = _constants(program)
    call = f"entries({''.join(f'{name}, ' for name in given)}lane, at, left, "
    begin = end = added = ""
    if program.measured is not None:
        text, power = MEASURED[program.measured[0]]
        lines.append(f"entry = v{program.measured[1]}.to(tl.float32)")
        lines.append("entry = entry if FULL else tl.where(mask, entry, 0.0)")
        lines.append(f"return {text.format('entry')}")
        start = "0.0, tl.float64" if power else "0, tl.int32"
        begin, added = f"total = tl.full((), {start})\n    ", "total += {}"
        total, one = "total", "row" if program.rows else "tensor"
        if not power:
            added = "total = tl.maximum(total, {})"
            total = "total.to(tl.float32, bitcast=True).to(tl.float64)"
        last = "root(total)" if power == 2 else total
        end = ALONE.format(one=one, last=last, total=total)
    names = signature(program)
    return SOURCE.format(
        home=HOME,
        given="".join(f"{name}, " for name in given),
        lines="\n    ".join(lines),
        names=list(names),
        where=ROWS if program.rows else TENSORS,
        signature=", ".join(f'{name}: "{kind}"' for name, kind in names.items()),
        constants="\n    ".join(constants),
        begin=begin,
        full=(added or "{}").format(f"{call}True)"),
        rest=(added or "{}").format(f"{call}False)"),
        end=end or "return",
    )


def signature(program: Program) -> dict[str, str]:
    """The arguments of a kernel and their types; ALIGNED comes behind them."""
    names = {"addresses": "*i64", "layout": "*i64", "chunks": "*i32", "count": "i32"}
    names |= {"skip": "i32", "width": "i32"} if program.rows else {"skip": "i32"}
    names |= {"numbers": "*fp64"}
    names |= {f"vectors{i}": POINTERS[dtype] for i, dtype in enumerate(program.vectors)}
    names |= {f"scalars{i}": POINTERS[dtype] for i, dtype in enumerate(program.scalars)}
    return names if program.measured is None else names | {"parts": "*fp64", "alone": "i32"}


def _constants(program: Program) -> tuple[list[str], list[str]]:
    """The lines that make what all entries of a chunk share, and their names."""
    lines, names = [], []
    for i, dtype in enumerate(program.buffers):
        kind = f"tl.pointer_type(tl.{TYPES[dtype][0]})"
        lines.append(f"x{i} = tl.load(addresses + {i} * count + tensor).to({kind}) + at")
        lines.append(f"x{i} = tl.multiple_of(x{i}, 16) if ALIGNED else x{i}")
        names.append(f"x{i}")
    for kind, many, place in (
        ("number", program.numbers, "numbers + {}"),
        ("vector", len(program.vectors), "vectors{} + tensor"),
        ("row", len(program.vectors), "vectors{} + row"),
        ("scalar", len(program.scalars), "scalars{}"),
    ):
        for i in range(many):
            if kind in ("vector", "row") and (i in program.of_rows) != (kind == "row"):
                continue
            lines.append(f"{kind}{i} = tl.load({place.format(i)})")
            names.append(f"{kind}{i}")
    return lines, names


def _line(
    program: Program, name: str, operands: tuple[NodeOperand, ...], kinds: list[str]
) -> tuple[str, str] | None:
    """The type of a value and its expression."""
    which = operands[0][1]
    if name == "load":
        dtype = program.buffers[which]
        read = f"tl.load(x{which} + lane, mask=mask, other=other)"
        return WIDE.get(dtype, "float32"), TYPES[dtype][1].format(read)
    if name == "round":
        _, key, start, half = [which for _, which in operands]
        return "float32", f"rounded(v{which}, vector{key}, vector{start}, place, {half})"
    first = kinds[which]
    if name == "over":
        ratio = "{}{}".format(*operands[1])
        return first, f"over(v{which}, {ratio}.to(tl.float64))"
    if name == "to":
        dtype = getattr(torch, operands[1][1].removeprefix("torch."))
        if dtype not in TYPES:
            return None
        stored = TYPES[dtype][2].format(f"v{which}")
        return WIDE.get(dtype, "float32"), TYPES[dtype][1].format(stored)
    boolean = OPERATORS[name].boolean
    if first == "int1" and not boolean:
        return None
    some = [kinds[which] for kind, which in operands if kind == "value"]
    widest = "float64" if "float64" in some else "float32"
    computed = "float64" if name in IN_DOUBLE else widest
    terms = []
    for position, (kind, which) in enumerate(operands):
        text = f"v{which}" if kind == "value" else f"{kind}{which}"
        if name == "where" and position == 1:
            terms.append(f"({text} != 0)")
        else:
            same = kind == "value" and kinds[which] == computed
            terms.append(text if same else f"{text}.to(tl.{computed})")
    if name == "pow" and computed == "float64":  # what Triton has is right in float32
        return None
    made = "int1" if boolean else widest
    text = OPERATORS[name].native.format(*terms, lib="tl.", power="power")
    return made, f"({text}).to(tl.{made})"


# ---------------------------------------------------------------------- running


class TritonCall:
    """A program as a call: all tensors in one launch, and another for those at odd addresses."""

    def __init__(self, program: Program, text: str) -> None:
        self.program, self.kernel = program, TritonKernel("program", text, signature(program))

    def __call__(
        self, given: Launch, sizes: Sequence[int], out: Tensor | None = None
    ) -> Tensor | None:
        """Run it for the first `sizes` entries of each tensor; returns the statistics, in `out`."""
        with on(self.program.device):
            return self._run(given, sizes, out)

    def _run(self, given: Launch, sizes: Sequence[int], out: Tensor | None) -> Tensor | None:
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
            power = MEASURED[measured[0]][1]
            launch(JOINED, width, parts[0], table.layout, width, out, most, POWER=power)
        return out


@cache
def native(program: Program) -> TritonCall | None:
    """A program as a call, or None where it cannot be one."""
    text = source(program)
    return None if text is None else TritonCall(program, text)
