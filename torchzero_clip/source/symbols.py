"""Values and operations. A value is a result in the file, and an operation computes values."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Kind = Literal["list", "tensor", "number", "sizes"]
Names = Callable[["Value"], str]
"""A function that returns the text of an operand."""
Write = Callable[[Names], str]
"""A function that returns the text of an operation."""
ATOM, UNARY, PRODUCT, SUM, AND, OR, COMPARE = range(14, 0, -2)
"""Precedences of Python's operators: a higher number binds more tightly."""
BINARY = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "div": ("/", PRODUCT),
    "truediv": ("/", PRODUCT),
    "pow": ("**", UNARY + 1),
    "and": ("&", AND),
    "or": ("|", OR),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}
"""The sign and the precedence of binary operators."""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class Raw(str):
    """A string that is written into the file without quotes."""


class SourceError(ValueError):
    """The error for a chain that cannot be written as a file that imports only torch."""


@dataclass(frozen=True)
class Context:
    """A context: the parameters of a group that a list covers, either all or those of a mask.

    Args:
        path: A text that is different for each context of a step.
        flags: The flags of the mask, or None for all parameters.
        outer: The context outside of the mask, or None.
    """

    path: str = ""
    flags: Value | None = None
    outer: Context | None = None


@dataclass(eq=False)
class Value:
    """A result with a name: a list with a tensor for each parameter, a tensor, or a number.

    Args:
        kind: The kind of result. "sizes" are numbers, one for each parameter.
        joint: Whether there is one value for all groups, instead of one value for each group.
        context: The parameters that the value covers.
        hint: The name that the value has in the rule.
        root: The value with which this value shares memory.
        op: The operation that computes the value.
        elements: The Python type of a list: "list" or "tuple".
        live: For a hyperparameter, the key in the group, and the index if the key holds a tuple.
        name: The name in the file, after `ValueNames` has chosen it.
    """

    kind: Kind
    joint: bool = False
    context: Context = field(default_factory=Context)
    hint: str = ""
    root: Value | None = None
    op: Op | None = None
    elements: str = "list"
    live: tuple[str, int | None] | None = None
    name: str = ""

    @property
    def memory(self) -> Value:
        """The value that owns the memory. It may be this value itself."""
        return self if self.root is None else self.root.memory

    @property
    def numeric(self) -> bool:
        """Whether the value is an expression of numbers. Such a value has no line of its own."""
        return self.kind in ("number", "sizes")


@dataclass(eq=False)
class Op:
    """An operation of a step.

    Args:
        write: The function that returns the text of the operation.
        args: The values that the operation reads.
        out: The value that the operation computes, or None.
        writes: The values that the operation changes in place.
        each: Whether its text is about one parameter, and the file runs it for each parameter.
        foreach: Whether it is a call of a list function, `torch._foreach_*`.
        gathers: Whether it concatenates the lists of all groups. Its result may be inlined even if
            the rule gives the result a name.
        copies: Whether it copies one list into another.
        clones: Whether it returns a copy of a list.
        alone: Whether it has no operand except the list that it changes.
        scales: Whether it multiplies a list by a hyperparameter.
        lasting: Whether its result outlives the step.
        stays: Whether it always has a line of its own.
        always: Whether it runs even if a mask selects no parameter.
        takes: The kind of input that it reads from the parameters of its context: "params",
            "grads", "state", "layer" or "flags". It is empty if the operation reads no input. Every
            loop that needs an input reads it again.
        joint: Whether it runs once for all groups.
        context: The parameters that the operation covers.
        link: The path of the link that recorded the operation.
        phase: The phase of the operation. `schedule.phases` sets it.
    """

    write: Write
    args: list[Value]
    out: Value | None = None
    writes: list[Value] = field(default_factory=list)
    each: bool = False
    foreach: bool = False
    gathers: bool = False
    copies: bool = False
    clones: bool = False
    alone: bool = False
    scales: bool = False
    lasting: bool = False
    stays: bool = False
    always: bool = False
    joint: bool = False
    takes: str = ""
    context: Context = field(default_factory=Context)
    link: str = ""
    phase: int = 0

    @property
    def reads(self) -> list[Value]:
        """The values whose memory is read, including the operands of expressions of numbers."""
        return [value.memory for value in self.operands()]

    def operands(self) -> Iterator[Value]:
        """Yield the values that the operation reads, including values in expressions of numbers."""
        for value in self.args:
            if value.numeric and value.op is not None:
                yield from value.op.operands()
            elif not value.numeric:
                yield value


def binary(symbol: str, left: Any, right: Any, names: Names) -> str:
    """Return the text of a binary operator with its operands."""
    sign, precedence = BINARY[symbol]
    left_text = operand(left, names)
    right_text = operand(right, names)
    left_precedence = precedence_of(left_text)
    right_precedence = precedence_of(right_text)
    is_power = symbol == "pow"
    if is_power or symbol in COMPARISONS:
        wrap_left = left_precedence <= precedence
    else:
        wrap_left = left_precedence < precedence
    if is_power:
        wrap_right = right_precedence < precedence
    else:
        wrap_right = right_precedence <= precedence
    if wrap_left:
        left_text = f"({left_text})"
    if wrap_right:
        right_text = f"({right_text})"
    if is_power and simple(left_text, right_text):
        return f"{left_text}**{right_text}"
    return f"{left_text} {sign} {right_text}"


def simple(*texts: str) -> bool:
    """Return whether formatters write `**` between these operands without spaces."""
    return all(text.replace("_", "").replace(".", "").isalnum() for text in texts)


def operand(x: Any, names: Names) -> str:
    """Return the text of a value or a constant."""
    if not isinstance(x, Value):
        return constant(x, names)
    if not x.numeric:
        return names(x)
    if x.name:
        return x.name
    assert x.op is not None
    return x.op.write(names)


def precedence_of(text: str) -> int:
    """Return the precedence of the outermost operator of an expression."""
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.BinOp):
        kind = type(node.op).__name__
        table = {"Add": SUM, "Sub": SUM, "Mult": PRODUCT, "Div": PRODUCT, "Pow": UNARY + 1}
        return {"BitAnd": AND, "BitOr": OR, **table}.get(kind, COMPARE)
    if isinstance(node, ast.UnaryOp):
        return UNARY
    return COMPARE if isinstance(node, (ast.Compare, ast.BoolOp, ast.IfExp)) else ATOM


def atom(text: str) -> str:
    """Return an expression, in parentheses unless it is a name or a call."""
    return text if precedence_of(text) >= ATOM else f"({text})"


def constant(x: Any, names: Names = str) -> str:
    """Return the text of a constant, or of a list, tuple or slice that contains values."""
    if isinstance(x, Raw):
        return str(x)
    if isinstance(x, (list, tuple)):
        inner = [operand(item, names) for item in x]
        if len(inner) == 1 and isinstance(x[0], Value) and x[0].kind == "list":
            return inner[0]  # the value is already a list with a tensor for each parameter
        if isinstance(x, list):
            return f"[{', '.join(inner)}]"
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    if isinstance(x, slice):
        ends = ["" if end is None else constant(end, names) for end in (x.start, x.stop)]
        return ":".join(ends)
    if isinstance(x, float) and math.isnan(x):
        return "torch.nan"
    if isinstance(x, float) and math.isinf(x):
        return "torch.inf" if x > 0 else "-torch.inf"
    if isinstance(x, str):
        return quoted(x)
    if isinstance(x, (torch.dtype, bool, int, float, type(...))) or x is None:
        return repr(x)
    raise SourceError(f"the value {x!r} cannot be written as Python code")


def numbered(base: str) -> Iterator[str]:
    """Yield a name, and then the same name with the numbers 2, 3, …"""
    yield base
    yield from (f"{base}_{number}" for number in itertools.count(2))


def quoted(text: str) -> str:
    """Return a string literal in the style of formatters, with double quotes if possible."""
    shown = repr(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in text else shown


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any], names: Names) -> str:
    """Return the text of a function call."""
    arguments = [operand(x, names) for x in args]
    arguments += [f"{key}={operand(x, names)}" for key, x in kwargs.items()]
    return f"{name}({', '.join(arguments)})"
