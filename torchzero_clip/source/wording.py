"""Wording: a function of torch and its operands, as Python would have them."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import resolve_name

from torchzero_clip.source.symbols import (
    ATOM,
    BINARY,
    COMPARISONS,
    PRODUCT,
    UNARY,
    Names,
    Raw,
    Value,
    Write,
    binary,
    call,
    operand,
)

PREFIXES = {"__neg__": "-", "neg": "-", "__invert__": "~"}


def name_of(function: Any) -> str:
    """The name of a function of torch, with its module or class."""
    name = resolve_name(function) or getattr(function, "__name__", repr(function))
    if name.startswith("torch."):
        return name
    return f"torch.{name}" if hasattr(torch, name) else name


def called(
    name: str, args: list[Any], kwargs: dict[str, Any], like: Value | None, names: Names
) -> tuple[str, int]:
    """A call, as an operator or a method where it is one; constants are on the device of `like`."""
    base = name.rpartition(".")[2]
    kwargs = {key: x for key, x in kwargs.items() if key != "dtype" or base == "norm"}
    kwargs = {key: x for key, x in kwargs.items() if not (key == "alpha" and x == 1)}
    if isinstance(device := kwargs.get("device"), torch.device):
        kwargs["device"] = Raw(f"{names(like)}.device" if like else repr(str(device)))
    bare = base.strip("_")
    plain_name = base in ("add", "sub", "mul", "div", *COMPARISONS)
    if (base.startswith("__") or plain_name) and not name.startswith("torch._"):
        if bare.startswith("r") and bare[1:] in BINARY:
            return binary(bare[1:], args[1], args[0], names)
        if bare in BINARY and len(args) == 2 and not kwargs:
            return binary(bare, args[0], args[1], names)
    args, kwargs = _numbers(base, args, kwargs, names)
    method = name.startswith("torch.Tensor.")
    if base in PREFIXES and method:
        text, binds = operand(args[0], names)
        return PREFIXES[base] + (text if binds in (UNARY, ATOM) else f"({text})"), UNARY
    if base == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        inner = ", ".join([operand(x, names)[0] for x in index])
        return f"{wrapped(args[0], names)}[{inner}]", ATOM
    if method:
        made, binds = call(base, args[1:], kwargs, names)
        return f"{wrapped(args[0], names)}.{made}", binds
    return call(name, args, kwargs, names)


def _numbers(
    base: str, args: list[Any], kwargs: dict[str, Any], names: Names
) -> tuple[list[Any], dict[str, Any]]:
    """Operands for which torch takes a number, but a tensor of one only if it is told so."""
    last = args[3] if base.startswith("_foreach_addc") and len(args) == 4 else None
    if isinstance(last, (int, float)) or (isinstance(last, Value) and last.numeric):
        return args[:3], {"value": last, **kwargs}
    if base == "nanquantile":
        return [args[0], Raw(f"float({operand(args[1], names)[0]})"), *args[2:]], kwargs
    return args, kwargs


def wrapped(x: Any, names: Names) -> str:
    """An operand of what binds more tightly than any operator."""
    text, binds = operand(x, names)
    return text if binds >= ATOM else f"({text})"


def method(x: Value, name: str) -> Write:
    """A method without arguments."""
    return lambda names: (f"{wrapped(x, names)}.{name}()", ATOM)


def part(write: Write, of: str) -> Write:
    """A part of what an operation gives."""

    def written(names: Names) -> tuple[str, int]:
        text, binds = write(names)
        return f"{text}{of}" if binds >= ATOM else f"({text}){of}", ATOM

    return written


def repeated(value: Value, over: Value) -> Write:
    """A list with the same tensor for every parameter."""
    return lambda names: (f"[{names(value)}] * len({names(over)})", PRODUCT)
