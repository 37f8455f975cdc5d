"""Languages: what programs in C++ and in Triton say alike, from the one table of operators.

A language is its words for dtypes, for what lies in memory, and for a value that gets a name. A
list program is its statements for one entry, which are made here; what surrounds them is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchzero_clip.core.norms import NAMED
from torchzero_clip.engines.compiled.printers.operators import OPERATORS
from torchzero_clip.engines.compiled.printers.pointer_tables import WIDE_LOADS
from torchzero_clip.engines.compiled.printers.program import NodeOperand, Program
from torchzero_clip.engines.compiled.printers.vectors import Number

ENDINGS = {NAMED["l1"]: 1, NAMED["l2"]: 2, NAMED["linf"]: 0, NAMED["sum"]: 1}
"""The measures that programs take, and how what several find of a tensor is joined: 0 for the
largest, 1 for the sum, 2 for its root."""
STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.bool)
"""The dtypes of lists."""


class Named(NamedTuple):
    """Something that has a name in a text, and its dtype."""

    name: str
    dtype: torch.dtype


class Statements(NamedTuple):
    """A list program in statements: what the entries of a tensor share, by name, and for each."""

    shared: dict[str, str]
    each: list[str]


class Taken(NamedTuple):
    """An operand in the text of an operator, which says how it is taken; see `Operator`."""

    language: Language
    term: Named | Number
    dtype: torch.dtype  # that is computed in

    def __format__(self, how: str) -> str:
        if not isinstance(self.term, Named):
            number = self.language.number(self.term, self.dtype)
            return self.language.constant.format(self.language.words[self.dtype], number)
        name, dtype = self.term
        if how == "ratio":
            return self.language.ratio.format(name)
        return name if how == "own" or dtype == self.dtype else self.language.cast(name, self.dtype)


@dataclass(frozen=True)
class Language:
    """The words of a language.

    Attributes:
        words: The dtypes of values.
        stored: The same of what lies in memory, for `given`.
        given: For each kind of operand of a list program the text that finds it, for which it is
            and what lies there, and the dtypes that it may have. Of a buffer it is a statement.
        casts: A value in another dtype, for the word of the dtype and the value.
        lets: A statement that gives a name to a value, for the word, the name and the value.
        lib: Where functions are that it has itself.
        power: What takes a power.
        number: A number of a dtype.
        constant: It as a value, for the word of the dtype and the number.
        reads: The value of what lies in memory, by dtype, where it is not the same.
        writes: What lies in memory for a value, where that is no cast.
        cut: The same for a value that was rounded to what bfloat16 has.
        entry: An entry of a list, for its name.
        stores: A statement that writes it, for which and what lies in memory then.
        ratio: What `over` divides by.
        divisor: A statement that finds it, once for all entries of a tensor.
        loop, end: The head of a loop, for an index and how many there are, and what ends it.
        begins: A statement that names what entries join, for the word of its dtype, its name, the
            number that it begins as, and the shape of lanes.
        joins: A statement that has one join, for the word, the name, a text, and the mask of lanes.
        lanes: What lanes have in the end, for a name and the function that joins two.
        double: Whether it computes in float64 what the table says so of.
        lacks: Operators that it has not in a dtype.
    """

    words: Mapping[torch.dtype, str]
    stored: Mapping[torch.dtype, str]
    given: Mapping[str, tuple[str, Collection[torch.dtype]]]
    casts: str
    lets: str
    lib: str
    power: str
    number: Callable[[Number, torch.dtype], str]
    constant: str
    reads: Mapping[torch.dtype, str]
    writes: Mapping[torch.dtype, str]
    cut: str
    entry: str
    stores: str
    ratio: str
    divisor: str
    loop: str
    end: Sequence[str]
    begins: str
    joins: str
    lanes: str = ""
    double: bool = False
    lacks: Sequence[tuple[str, torch.dtype]] = ()

    def cast(self, text: str, dtype: torch.dtype) -> str:
        return self.casts.format(self.words[dtype], text)

    def let(self, name: str, text: str, dtype: torch.dtype) -> str:
        return self.lets.format(self.words[dtype], name, text)

    def read(self, text: str, dtype: torch.dtype) -> str:
        return self.reads.get(dtype, "{}").format(text)

    def written(self, text: str, dtype: torch.dtype) -> str:
        known = self.writes.get(dtype)
        return self.cast(text, dtype) if known is None else known.format(text)

    def expression(self, name: str, terms: Sequence[Named | Number], dtype: torch.dtype) -> str:
        """An operator that is computed in a dtype."""
        row = OPERATORS[name]
        computed = torch.float64 if row.double and self.double else dtype
        given = [Taken(self, term, computed) for term in terms]
        return row.native.format(*given, lib=self.lib, power=self.power)

    # ------------------------------------------------------------------ lists

    def entries(self, program: Program) -> Statements | None:
        """A list program; None where it has dtypes or operators that only torch computes."""
        given: dict[NodeOperand, Named] = {
            ("half", i): Named(str(i), torch.int32) for i in range(4)
        }
        shared, each = dict[str, str](), list[str]()
        widest = max([dtype.itemsize for dtype in program.buffers])
        for kind, i, dtype in program.operands:
            if kind not in self.given or dtype not in self.given[kind][1]:
                return None
            wide = WIDE_LOADS * dtype.itemsize // widest
            name, text = f"{kind}{i}", self.given[kind][0].format(i, self.stored[dtype], wide)
            given[kind, i] = Named(name, dtype)
            shared[name] = text if kind == "buffer" else self.let(name, text, dtype)
        ratios = ["{}{}".format(*row[1]) for name, row in program.nodes if name == "over"]
        shared |= {self.ratio.format(x): self.divisor.format(x) for x in ratios}
        lines = sorted(enumerate(program.nodes), key=lambda line: line[1][0] != "load")
        for i, (name, operands) in lines:  # first all loads, which a card then waits for at once
            made = self._made(name, operands, given)
            if made is None:
                return None
            given["value", i] = Named(f"v{i}", made[1])
            each.append(self.let(f"v{i}", *made))
        for i, value in program.stores:
            text, dtype = f"v{value}", program.buffers[i]
            cut = program.nodes[value][0] == "round" and dtype == torch.bfloat16
            stored = self.cut.format(text) if cut else self.written(text, dtype)
            each.append(self.stores.format(i, stored))
        return Statements(shared, each)

    def _made(
        self, name: str, operands: tuple[NodeOperand, ...], given: dict[NodeOperand, Named]
    ) -> tuple[str, torch.dtype] | None:
        """The text of a node, and its dtype."""
        first = given[operands[0]]
        if name in ("load", "to"):
            text, dtype = self.entry.format(first.name), first.dtype
            if name == "to":
                dtype = getattr(torch, operands[1][1].removeprefix("torch."))
                text = self.written(first.name, dtype) if dtype in STORED else ""
            return (self.read(text, dtype), computed_in(dtype)) if text else None
        flag, kinds = OPERATORS[name].flag, [given[x].dtype for x in operands if x[0] == "value"]
        dtype = torch.float64 if torch.float64 in kinds else torch.float32
        if (first.dtype == torch.bool and not flag) or (name, dtype) in self.lacks:
            return None
        text = self.expression(name, [given[x] for x in operands], dtype)
        return text, torch.bool if flag else dtype


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an entry that was read: what has 16 bits is computed in float32."""
    return dtype if dtype in (torch.float64, torch.bool) else torch.float32
