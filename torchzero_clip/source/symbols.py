"""Values: what the lines of a file compute, and the operations that make and write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Kind = Literal["list", "tensor", "number", "sizes"]
Names = Callable[["Value"], str]
"""How an operation writes one of its operands."""
Write = Callable[[Names], tuple[str, int]]
"""How an operation is written, and how tightly its operator binds."""
ATOM, UNARY, PRODUCT, SUM, SHIFT, AND, OR, COMPARE = range(16, 0, -2)
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
"""Operators and how tightly they bind."""


class Raw(str):
    """Text that stands for itself."""


class SourceError(ValueError):
    """Something that a chain does and a file of plain torch cannot say."""


@dataclass(frozen=True)
class Context:
    """Which parameters of a group a list is of: all of them, or those with a flag."""

    path: str = ""
    flags: Value | None = None
    outer: Context | None = None


@dataclass(eq=False)
class Value:
    """Something with a name: a list with a tensor for each parameter, a tensor, or a number.

    Args:
        kind: "sizes" are numbers, one a parameter.
        joint: Whether it is of all groups, not of one.
        context: The parameters that it is of.
        hint: The name that it has in the rule.
        root: The value whose memory it lies in.
        made: The operation that makes it.
        elements: What Python has for it: "list" or "tuple".
        live: The key in a group that it is the value of, and of a tuple which.
    """

    kind: Kind
    joint: bool = False
    context: Context = field(default_factory=Context)
    hint: str = ""
    root: Value | None = None
    made: Op | None = None
    elements: str = "list"
    live: tuple[str, int | None] | None = None
    name: str = ""

    @property
    def memory(self) -> Value:
        """The value whose memory it lies in, or itself."""
        return self if self.root is None else self.root.memory

    @property
    def numeric(self) -> bool:
        """Whether it is an expression of numbers, written where it is used."""
        return self.kind in ("number", "sizes")


@dataclass(eq=False)
class Op:
    """An operation of a step.

    Args:
        write: The expression or statement, and how tightly its operator binds.
        args: The values that it reads.
        out: The value that it makes, if any.
        writes: The values that it changes in place.
        each: Whether it is about one parameter at a time.
        effect: Whether it is a statement.
        repeats: Whether every loop that needs the value computes it anew.
        gathers: Whether it puts the lists of all groups together.
        copies: Whether it copies one list into another.
        clones: Whether it makes a copy of a list.
        alone: Whether it has no operand but the list that it writes.
        unbinds: Whether it takes a vector apart.
        scales: Whether it multiplies a list by a live value.
        lasting: Whether what it makes outlives the step.
        stays: Whether it has a line of its own.
        small: Whether it has none, though a rule gives it a name.
        always: Whether it runs where no parameter has the flag.
        takes: What it takes of the parameters in its context, where it is a list to begin with.
        joint, context, link: Where it stands.
    """

    write: Write
    args: list[Value]
    out: Value | None = None
    writes: list[Value] = field(default_factory=list)
    each: bool = False
    effect: bool = False
    repeats: bool = False
    foreach: bool = False
    gathers: bool = False
    copies: bool = False
    clones: bool = False
    alone: bool = False
    unbinds: bool = False
    scales: bool = False
    lasting: bool = False
    stays: bool = False
    small: bool = False
    always: bool = False
    joint: bool = False
    takes: str = ""
    context: Context = field(default_factory=Context)
    link: str = ""
    phase: int = 0

    @property
    def reads(self) -> list[Value]:
        """The memory that it reads, numbers in expressions included."""
        return [value.memory for value in self.operands()]

    def operands(self) -> Iterator[Value]:
        """The values that it reads; of an expression of numbers those in it."""
        for value in self.args:
            if value.numeric and value.made is not None:
                yield from value.made.operands()
            elif not value.numeric:
                yield value


def binary(symbol: str, left: Any, right: Any, names: Names) -> tuple[str, int]:
    """An operator between two operands."""
    operator, binds = BINARY[symbol]
    a, b = operand(left, names), operand(right, names)
    low = a[1] < binds or (symbol in ("pow", *COMPARISONS) and a[1] <= binds)
    x = f"({a[0]})" if low else a[0]
    y = f"({b[0]})" if b[1] <= binds and not (symbol == "pow" and b[1] == binds) else b[0]
    return (f"{x}**{y}" if symbol == "pow" and simple(x, y) else f"{x} {operator} {y}"), binds


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def simple(*texts: str) -> bool:
    """Whether a power of these is written without spaces, as formatters do."""
    return all(text.replace("_", "").replace(".", "").isalnum() for text in texts)


def operand(x: Any, names: Names) -> tuple[str, int]:
    """A value or a constant as text, and how tightly it binds."""
    if isinstance(x, Value):
        if x.numeric and x.name:
            return x.name, ATOM
        if x.numeric:
            assert x.made is not None
            return x.made.write(names)
        text = names(x)
        return text, strength(text)
    return constant(x, names), ATOM if not (isinstance(x, (int, float)) and x < 0) else UNARY


def strength(text: str) -> int:
    """How tightly the outermost operator of an expression binds, by the tree of it."""
    import ast

    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.BinOp):
        kind = type(node.op).__name__
        table = {"Add": SUM, "Sub": SUM, "Mult": PRODUCT, "Div": PRODUCT, "Pow": UNARY + 1}
        return {"BitAnd": AND, "BitOr": OR, **table}.get(kind, COMPARE)
    if isinstance(node, ast.UnaryOp):
        return UNARY
    return COMPARE if isinstance(node, (ast.Compare, ast.BoolOp, ast.IfExp)) else ATOM


def constant(x: Any, names: Names) -> str:
    """A constant, or a structure with values in it, as text."""
    if isinstance(x, Raw):
        return str(x)
    if isinstance(x, (list, tuple)):
        inner = [operand(item, names)[0] for item in x]
        if len(inner) == 1 and isinstance(x[0], Value) and x[0].kind == "list":
            return inner[0]  # a list with a tensor for each parameter
        if isinstance(x, list):
            return f"[{', '.join(inner)}]"
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    if isinstance(x, slice):
        ends = ["" if end is None else constant(end, names) for end in (x.start, x.stop)]
        return ":".join(ends)
    if isinstance(x, float) and not math.isfinite(x):
        return "torch.nan" if x != x else "torch.inf" if x > 0 else "-torch.inf"
    if isinstance(x, str):
        return quoted(x)
    if isinstance(x, (torch.dtype, bool, int, float, type(...))) or x is None:
        return repr(x)
    raise SourceError(f"a file has no words for {x!r}")


def quoted(text: str) -> str:
    """A string as formatters write it."""
    shown = repr(text)
    return f'"{shown[1:-1]}"' if shown[0] == "'" and '"' not in text else shown


def call(name: str, args: Sequence[Any], kwargs: dict[str, Any], names: Names) -> tuple[str, int]:
    """A call as text."""
    given = [operand(x, names)[0] for x in args]
    given += [f"{key}={operand(x, names)[0]}" for key, x in kwargs.items()]
    return f"{name}({', '.join(given)})", ATOM
