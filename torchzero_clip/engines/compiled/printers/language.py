"""Languages: how C++ and Triton write the same operations.

A `Language` has the texts of a target language, such as names of dtypes, casts, loads and stores.
The method `Language.expression` prints one operator of the table in operators.py. The method
`Language.statements` prints a list program as statements for one element. The modules cpp.py and
triton.py define the two languages. They also print the loops and the function arguments around
these statements.
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
"""The measures that kernels compute. The code of a measure says how partial results are joined: 0
takes the largest, 1 takes the sum, and 2 takes the square root of the sum."""
STORED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.bool)
"""The dtypes that lists of tensors may have."""


class Named(NamedTuple):
    """A variable in the printed text: its name, and the dtype of its value."""

    name: str
    dtype: torch.dtype


class Statements(NamedTuple):
    """The statements of a list program.

    Attributes:
        shared: The statements before the loop over elements, each under the name that it defines.
        each: The statements inside the loop over elements.
    """

    shared: dict[str, str]
    each: list[str]


class OperandText(NamedTuple):
    """An operand as a part of an operator's text. `Operator.native` lists the format codes."""

    language: Language
    term: Named | Number
    dtype: torch.dtype  # of the computation

    def __format__(self, how: str) -> str:
        if not isinstance(self.term, Named):
            number = self.language.number(self.term, self.dtype)
            return self.language.constant.format(self.language.types[self.dtype], number)
        name, dtype = self.term
        if how == "ratio":
            return f"over_{name}"
        return name if how == "own" or dtype == self.dtype else self.language.cast(name, self.dtype)


@dataclass(frozen=True)
class Language:
    """The texts of a target language. Most are format strings.

    In the following list, parentheses contain the arguments of a format string, in their order.

    Attributes:
        types: For each dtype, the type of a variable.
        stored_types: For each dtype, the type of elements in memory. `inputs` uses these types.
        inputs: For each kind of operand of a list program: the text that reads an operand (index of
            the operand, type in memory, number of elements per load), and the allowed dtypes. For a
            buffer, the text is a statement.
        casts: A cast (type, value).
        lets: A statement that assigns a value to a variable (type, name, value).
        lib: The prefix of the language's own functions, such as `exp`.
        power: The name of the function that computes a power.
        number: A function that prints a number of a dtype.
        constant: A number as an expression (type, number).
        reads: For some dtypes, the text that converts an element in memory to a value (element).
            Other dtypes need no conversion.
        writes: For some dtypes, the text that converts a value to an element in memory (value).
            Other dtypes use `casts`.
        cut: The conversion of a value that was already rounded to bfloat16 (value).
        entry: An element of a list (name of the list).
        stores: A statement that writes an element (index of the buffer, element).
        divisor: A statement that prepares the divisor of `over` once per tensor (name of the
            ratio). The name of the divisor is the name of the ratio after "over_".
        loop: The first line of a loop (index variable, number of iterations).
        end: The lines that end a loop.
        begins: A statement that begins a reduction (type, name, start value, shape of the lanes).
        joins: A statement that adds an element to a reduction (type, name, joined value, mask of
            the lanes).
        lanes: The joined value of all lanes (name, function that joins two values). A lane is one
            of the elements that a Triton program processes at the same time.
        double: Whether the language computes operators with `Operator.double` in float64.
        lacks: Pairs of an operator and a dtype that the language does not support.
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
    divisor: str
    loop: str
    end: Sequence[str]
    begins: str
    joins: str
    lanes: str = ""
    double: bool = False
    lacks: Sequence[tuple[str, torch.dtype]] = ()

    def cast(self, text: str, dtype: torch.dtype) -> str:
        """Return the text of a cast to a dtype."""
        return self.casts.format(self.types[dtype], text)

    def let(self, name: str, text: str, dtype: torch.dtype) -> str:
        """Return a statement that assigns a value to a variable."""
        return self.lets.format(self.types[dtype], name, text)

    def read(self, text: str, dtype: torch.dtype) -> str:
        """Return the text that converts an element in memory to a value."""
        return self.reads.get(dtype, "{}").format(text)

    def written(self, text: str, dtype: torch.dtype) -> str:
        """Return the text that converts a value to an element in memory."""
        known = self.writes.get(dtype)
        return self.cast(text, dtype) if known is None else known.format(text)

    def expression(self, name: str, terms: Sequence[Named | Number], dtype: torch.dtype) -> str:
        """Return an operator as text, computed in a dtype."""
        row = OPERATORS[name]
        computed = torch.float64 if row.double and self.double else dtype
        operands = [OperandText(self, term, computed) for term in terms]
        return row.native.format(*operands, lib=self.lib, power=self.power)

    # ------------------------------------------------------------------ lists

    def statements(self, program: Program) -> Statements | None:
        """Return a list program as statements, or None if the language cannot express it."""
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
                shared[f"over_{ratio}"] = self.divisor.format(ratio)
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
        """Return the text of a node and the dtype of the result.

        Return None if the language cannot express the node.
        """
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
    """Return the dtype in which kernels compute with elements of a dtype.

    Elements of 16 bits are computed in float32.
    """
    return dtype if dtype in (torch.float64, torch.bool) else torch.float32
