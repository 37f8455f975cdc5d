"""Languages: the texts that differ between C++ and Triton, and what both print alike.

A `Language` has the words of a target language: its names of dtypes, its casts, its loads and
stores. Its method `expression` prints an operator of the table in operators.py. Its method
`statements` prints a list program as statements for one element. The modules cpp.py and triton.py
have the two languages, and add the loops and arguments around these statements.
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
"""The measures that kernels compute, each with a code for how partial results become one statistic:
0 for the largest, 1 for the sum, 2 for the square root of the sum."""
STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.bool)
"""The dtypes of lists."""


class Named(NamedTuple):
    """A name in a text, and the dtype of its value."""

    name: str
    dtype: torch.dtype


class Statements(NamedTuple):
    """The statements of a list program.

    Attributes:
        shared: By name, the statements that run once for all elements of a tensor.
        each: The statements that run for each element.
    """

    shared: dict[str, str]
    each: list[str]


class OperandText(NamedTuple):
    """An operand that is formatted into the text of an operator; see `Operator.native`."""

    language: Language
    term: Named | Number
    dtype: torch.dtype  # of the computation

    def __format__(self, how: str) -> str:
        if not isinstance(self.term, Named):
            number = self.language.number(self.term, self.dtype)
            return self.language.constant.format(self.language.types[self.dtype], number)
        name, dtype = self.term
        if how == "ratio":
            return self.language.ratio.format(name)
        return name if how == "own" or dtype == self.dtype else self.language.cast(name, self.dtype)


@dataclass(frozen=True)
class Language:
    """The texts of a language. Most are format strings; the arguments are named in their order.

    Attributes:
        types: The types of values, by dtype.
        stored_types: The types of elements in memory, by dtype, for `inputs`.
        inputs: For each kind of operand of a list program, the text that reads it and the dtypes
            that it may have. The arguments of the text are the index of the operand, its type in
            memory, and the number of elements per load. The text of a buffer is a statement.
        casts: A cast, with the type and the value.
        lets: A statement that gives a value a name, with the type, the name and the value.
        lib: The namespace of the language's own functions.
        power: The function that computes a power.
        number: A function that prints a number of a dtype.
        constant: A number as a value, with the type and the number.
        reads: By dtype, how an element in memory becomes a value, unless it is one already.
        writes: By dtype, how a value becomes an element in memory, unless by a cast.
        cut: The same for a value that was already rounded to bfloat16.
        entry: An element of a list, with the name of the list.
        stores: A statement that writes an element, with the index of the buffer and the element.
        ratio: The name of the prepared divisor of `over`, with the name of the ratio.
        divisor: A statement that prepares it, once for all elements of a tensor.
        loop: The head of a loop, with its index and the number of its steps.
        end: The lines that end a loop.
        begins: A statement that begins a reduction, with the type, the name, the first value, and
            the shape of the lanes.
        joins: A statement that joins one more element, with the type, the name, the joined value,
            and the mask of the lanes.
        lanes: The joined value of all lanes, with the name and the function that joins two.
        double: Whether the language computes in float64 what the table of operators asks to.
        lacks: Operators that the language does not have in a dtype.
    """

    types: Mapping[torch.dtype, str]
    stored_types: Mapping[torch.dtype, str]
    inputs: Mapping[str, tuple[str, Collection[torch.dtype]]]
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
        """Return the text of a value in another dtype."""
        return self.casts.format(self.types[dtype], text)

    def let(self, name: str, text: str, dtype: torch.dtype) -> str:
        """Return a statement that gives a value a name."""
        return self.lets.format(self.types[dtype], name, text)

    def read(self, text: str, dtype: torch.dtype) -> str:
        """Return the text of the value of an element in memory."""
        return self.reads.get(dtype, "{}").format(text)

    def written(self, text: str, dtype: torch.dtype) -> str:
        """Return the text of the element in memory for a value."""
        known = self.writes.get(dtype)
        return self.cast(text, dtype) if known is None else known.format(text)

    def expression(self, name: str, terms: Sequence[Named | Number], dtype: torch.dtype) -> str:
        """Return the text of an operator that is computed in a dtype."""
        row = OPERATORS[name]
        computed = torch.float64 if row.double and self.double else dtype
        operands = [OperandText(self, term, computed) for term in terms]
        return row.native.format(*operands, lib=self.lib, power=self.power)

    # ------------------------------------------------------------------ lists

    def statements(self, program: Program) -> Statements | None:
        """Return a list program as statements; None if only PyTorch has its dtypes or operators."""
        names: dict[NodeOperand, Named] = {
            ("half", i): Named(str(i), torch.int32) for i in range(4)
        }
        shared = dict[str, str]()
        each = list[str]()
        widest = max([dtype.itemsize for dtype in program.buffers])
        for kind, i, dtype in program.operands:
            if kind not in self.inputs or dtype not in self.inputs[kind][1]:
                return None
            per_load = WIDE_LOADS * dtype.itemsize // widest
            name = f"{kind}{i}"
            text = self.inputs[kind][0].format(i, self.stored_types[dtype], per_load)
            names[kind, i] = Named(name, dtype)
            shared[name] = text if kind == "buffer" else self.let(name, text, dtype)
        for name, operands in program.nodes:
            if name == "over":
                ratio = names[operands[1]].name
                shared[self.ratio.format(ratio)] = self.divisor.format(ratio)
        # loads come first, so that a GPU waits for all of them at once
        nodes = sorted(enumerate(program.nodes), key=lambda line: line[1][0] != "load")
        for i, (name, operands) in nodes:
            node = self._node(name, operands, names)
            if node is None:
                return None
            names["value", i] = Named(f"v{i}", node[1])
            each.append(self.let(f"v{i}", *node))
        for i, value in program.stores:
            text = f"v{value}"
            dtype = program.buffers[i]
            cut = program.nodes[value][0] == "round" and dtype == torch.bfloat16
            stored = self.cut.format(text) if cut else self.written(text, dtype)
            each.append(self.stores.format(i, stored))
        return Statements(shared, each)

    def _node(
        self, name: str, operands: tuple[NodeOperand, ...], names: dict[NodeOperand, Named]
    ) -> tuple[str, torch.dtype] | None:
        """Return the text of a node and its dtype, or None if the language lacks it."""
        first = names[operands[0]]
        if name == "load":
            text = self.entry.format(first.name)
            return self.read(text, first.dtype), computed_in(first.dtype)
        if name == "to":
            dtype = getattr(torch, operands[1][1].removeprefix("torch."))
            if dtype not in STORED:
                return None
            return self.read(self.written(first.name, dtype), dtype), computed_in(dtype)
        flag = OPERATORS[name].flag
        dtypes = [names[x].dtype for x in operands if x[0] == "value"]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        if (first.dtype == torch.bool and not flag) or (name, dtype) in self.lacks:
            return None
        text = self.expression(name, [names[x] for x in operands], dtype)
        return text, torch.bool if flag else dtype


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an element that was read: 16 bits are computed in float32."""
    return dtype if dtype in (torch.float64, torch.bool) else torch.float32
