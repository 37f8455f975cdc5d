"""A chain as plain data and back: names, numbers, lists and dicts that JSON can hold."""

from __future__ import annotations

import importlib
import inspect
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.argument_values import is_row
from torchzero_clip.core.description import Description
from torchzero_clip.core.names import hint


def to_config(value: Any) -> Any:
    """Plain data for a description, or for a value that may be an argument of one."""
    if isinstance(value, Description):
        kind, inside = type(value).__name__, getattr(value, "links", None)
        arguments = {name: to_config(arg) for name, arg in value.arguments().items()}
        if inside is None:
            return {"type": kind, **arguments}
        links = [to_config(link) for link in inside]
        taken = inspect.signature(type(value)).parameters.values()
        preset = not any(p.kind is p.VAR_POSITIONAL for p in taken)  # it makes its links itself
        kind = "Chain" if preset else kind
        if kind == "Chain" and links and not arguments:  # an empty list is an empty tuple
            return links
        return {"type": kind, "links": links, **arguments}
    if isinstance(value, Tensor):
        return to_config(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, Mapping):
        return {"dict": [[key, to_config(item)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        items = [to_config(item) for item in value]
        return {"tuple": items} if _reads_as_chain(items) else items
    if callable(value):
        return {"function": _address(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a config holds numbers, text, functions and transforms, got {value!r}")


def from_config(config: Any) -> Any:
    """The description that `to_config` gave, or that was written by hand.

    A transform is `{"type": "ClipNorm", "max_norm": 1.0}`, the bare name, or a (name, arguments)
    pair; a chain is a list of those.
    """
    if isinstance(config, Description):
        return config
    if isinstance(config, str):
        return make(config, {})
    if _is_pair(config):
        return make(*config)
    if is_row(config):
        return make("Chain", {}, config)
    if _has_type(config):
        rest = {name: arg for name, arg in config.items() if name not in ("type", "links")}
        return make(config["type"], rest, config.get("links", ()))
    raise TypeError(
        "a config is a name, a (name, arguments) pair, a dict with 'type', or a list of those, got "
        f"{config!r}"
    )


def make(name: str, arguments: Mapping[str, Any], links: Iterable[Any] = ()) -> Any:
    """A description by the name of its class, with arguments and links as plain data."""
    inside = [from_config(link) for link in links]
    values = {key: _value(arg) for key, arg in arguments.items()}
    if name not in Description.registry:
        raise ValueError(f"unknown transform {name!r}{hint(name, Description.registry)}")
    cls = Description.registry[name]
    signature = inspect.signature(cls)
    known = list(signature.parameters)
    for key in values:
        if key not in known:
            raise ValueError(f"{name} has no argument {key!r}{hint(key, known)}; it has {known}")
    for key, p in signature.parameters.items():
        if key not in values and p.default is p.empty and p.kind is not p.VAR_POSITIONAL:
            raise ValueError(f"{name} needs the argument {key!r}; it has {known}")
    return cls(*inside, **values)


def _value(config: Any) -> Any:
    """An argument from plain data: marked dicts become the values that `to_config` marked."""
    row = is_row(config) and not isinstance(config, tuple)
    if _has_type(config) or (row and _reads_as_chain(config)):
        return from_config(config)
    if row:
        return tuple(map(_value, config))
    if not isinstance(config, Mapping):
        return config
    if "number" in config:
        return float(config["number"])
    if "function" in config:
        return _function(config["function"])
    if config.keys() == {"tuple"}:
        return tuple(map(_value, config["tuple"]))
    return {key: _value(item) for key, item in config.get("dict", config.items())}


def _reads_as_chain(items: Sequence[Any]) -> bool:
    """Whether a list as an argument means a chain, since all in it mean transforms."""
    return bool(items) and all(_is_transform(item) for item in items)


def _is_transform(config: Any) -> bool:
    if isinstance(config, str):
        return config in Description.registry
    return isinstance(config, Description) or _has_type(config) or _is_pair(config)


def _has_type(config: Any) -> bool:
    return isinstance(config, Mapping) and "type" in config


def _is_pair(config: Any) -> bool:
    named = is_row(config) and len(config) == 2 and isinstance(config[0], str)
    return named and isinstance(config[1], Mapping) and "type" not in config[1]  # else two links


def _address(function: Any) -> str:
    module = getattr(function, "__module__", None)
    for name in (getattr(function, key, None) for key in ("__qualname__", "__name__")):
        try:
            if _function(f"{module}:{name}") is function:
                return f"{module}:{name}"
        except (ImportError, AttributeError):
            continue
    raise TypeError(
        f"a config can name functions of modules only, got {function!r}: define it with def at "
        "the top of a module"
    )


def _function(address: str) -> Any:
    module, _, path = address.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))
