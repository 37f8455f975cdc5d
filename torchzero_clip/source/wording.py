"""The text of a torch call, written as an operator, a method or a function."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import resolve_name

from torchzero_clip.source.symbols import (
    ATOM,
    BINARY,
    COMPARISONS,
    UNARY,
    Names,
    Raw,
    Value,
    Write,
    atom,
    binary,
    call,
    operand,
    precedence_of,
)

PREFIXES = {"__neg__": "-", "neg": "-", "__invert__": "~"}


def name_of(function: Any) -> str:
    """Return the name of a torch function, with the module or class in front."""
    name = resolve_name(function) or getattr(function, "__name__", repr(function))
    if name.startswith("torch."):
        return name
    return f"torch.{name}" if hasattr(torch, name) else name


def called(
    name: str, args: list[Any], kwargs: dict[str, Any], like: Value | None, names: Names
) -> str:
    """Return the text of a call, written as an operator or a method if possible.

    Args:
        name: The name of the torch function.
        args: The positional arguments.
        kwargs: The keyword arguments.
        like: The value whose device new constants get.
        names: The names of values.
    """
    base = name.rpartition(".")[2]
    kwargs = {key: x for key, x in kwargs.items() if key != "dtype" or base == "norm"}
    kwargs = {key: x for key, x in kwargs.items() if not (key == "alpha" and x == 1)}
    if isinstance(device := kwargs.get("device"), torch.device):
        kwargs["device"] = Raw(f"{names(like)}.device" if like else repr(str(device)))
    bare = base.strip("_")
    has_operator = base.startswith("__") or base in ("add", "sub", "mul", "div", *COMPARISONS)
    if has_operator and not name.startswith("torch._"):
        if bare.startswith("r") and bare[1:] in BINARY:
            return binary(bare[1:], args[1], args[0], names)
        if bare in BINARY and len(args) == 2 and not kwargs:
            return binary(bare, args[0], args[1], names)
    args, kwargs = _numbers(base, args, kwargs, names)
    method = name.startswith("torch.Tensor.")
    if base in PREFIXES and method:
        text = operand(args[0], names)
        if precedence_of(text) not in (UNARY, ATOM):
            text = f"({text})"
        return PREFIXES[base] + text
    if base == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        inner = ", ".join([operand(x, names) for x in index])
        return f"{wrapped(args[0], names)}[{inner}]"
    if method:
        return f"{wrapped(args[0], names)}.{call(base, args[1:], kwargs, names)}"
    return call(name, args, kwargs, names)


def _numbers(
    base: str, args: list[Any], kwargs: dict[str, Any], names: Names
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in a form in which torch accepts 0-dim tensors in place of numbers."""
    last = args[3] if base.startswith("_foreach_addc") and len(args) == 4 else None
    if isinstance(last, (int, float)) or (isinstance(last, Value) and last.numeric):
        return args[:3], {"value": last, **kwargs}
    if base == "nanquantile":
        return [args[0], Raw(f"float({operand(args[1], names)})"), *args[2:]], kwargs
    return args, kwargs


def wrapped(x: Any, names: Names) -> str:
    """Return the text of an operand, in parentheses unless it is a name or a call."""
    return atom(operand(x, names))


def method(x: Value, name: str) -> Write:
    """Return the function that writes a method call without arguments."""
    return lambda names: f"{wrapped(x, names)}.{name}()"


def part(write: Write, suffix: str) -> Write:
    """Return the function that writes a part of a result, such as `[0]` or `.values`."""
    return lambda names: f"{atom(write(names))}{suffix}"


def repeated(value: Value, over: Value) -> Write:
    """Return the function that writes a list with the same tensor for every parameter."""
    return lambda names: f"[{names(value)}] * len({names(over)})"
