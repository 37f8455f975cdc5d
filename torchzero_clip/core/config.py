"""Configs: convert a chain to plain data, and plain data back to a chain.

Plain data consists of names, numbers, lists and dicts. JSON can represent all of these.
"""

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
from torchzero_clip.core.traits import only_routes


def to_config(value: Any) -> Any:
    """Return plain data for a description, or for the value of an argument."""
    if isinstance(value, Description):
        return _config_of(value)
    if isinstance(value, Tensor) and value.numel() == 1:
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
    raise TypeError(
        f"a config may contain only numbers, strings, functions and transforms, got {value!r}"
    )


def _config_of(description: Description) -> Any:
    """Return plain data for a description. A chain with links and no arguments becomes a list."""
    kind = type(description).__name__
    _refuse_other_class(type(description))
    arguments = {name: to_config(arg) for name, arg in description.arguments().items()}
    links = getattr(description, "links", None)
    parameters = inspect.signature(type(description)).parameters
    kinds = [p.kind for p in parameters.values()]
    if links is None:
        lost = [name for name in arguments if name not in parameters]
        if lost and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise TypeError(
                f"to_config: the __init__ of {kind} does not accept {lost[0]!r}, so a config "
                f"cannot contain it: accept {lost[0]!r} in __init__, or declare all arguments as "
                "fields and compute other fields in __post_init__"
            )
        return {"type": kind, **arguments}
    configs = [to_config(link) for link in links]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        if not only_routes(description):
            raise TypeError(
                f"to_config: a config of {kind} would lose the step that {kind} defines: let its "
                "constructor accept *links, as Chain does"
            )
        kind = "Chain"  # the constructor of this class makes the links itself
    if kind == "Chain" and configs and not arguments:  # an empty list reads as an empty tuple
        return configs
    return {"type": kind, "links": configs, **arguments}


def _refuse_other_class(cls: type[Description]) -> None:
    """Raise an error if the name of a class leads to a class that was defined elsewhere."""
    known = Description.registry[cls.__name__]
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(
            f"to_config: there are two classes {cls.__name__}, one in {known.__module__} and one "
            f"in {cls.__module__}, and from_config would create the first one: rename your class"
        )


def from_config(config: Any) -> Any:
    """Return the description for a config. `to_config` or a user has written the config.

    A transform is `{"type": "ClipNorm", "max_norm": 1.0}`, a bare name, or a (name, arguments)
    pair. A chain is a list of transforms.
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
        "a config must be a name, a pair (name, arguments), a dict with the key 'type', or a "
        f"list of such configs, got {config!r}"
    )


def make(name: str, arguments: Mapping[str, Any], links: Iterable[Any] = ()) -> Any:
    """Return an object of the class with this name, from arguments and links as plain data."""
    inside = [from_config(link) for link in links]
    values = {key: _value(arg) for key, arg in arguments.items()}
    if name not in Description.registry:
        raise ValueError(f"unknown transform {name!r}{hint(name, Description.registry)}")
    cls = Description.registry[name]
    signature = inspect.signature(cls)
    known = list(signature.parameters)
    accepts_all = any([p.kind is p.VAR_KEYWORD for p in signature.parameters.values()])
    for key in values:
        if key not in known and not accepts_all:
            raise ValueError(
                f"{name} has no argument {key!r}{hint(key, known)}; it accepts {known}"
            )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for key, p in signature.parameters.items():
        if key not in values and p.default is p.empty and p.kind not in variadic:
            raise ValueError(f"{name} requires the argument {key!r}; its arguments are {known}")
    return cls(*inside, **values)


def _value(config: Any) -> Any:
    """Return the value of an argument. Dicts that `to_config` made become the original values."""
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
    """Return whether a list in an argument is a chain: every item must describe a transform."""
    return bool(items) and all(_is_transform(item) for item in items)


def _is_transform(config: Any) -> bool:
    if isinstance(config, str):
        return config in Description.registry
    return isinstance(config, Description) or _has_type(config) or _is_pair(config)


def _has_type(config: Any) -> bool:
    return isinstance(config, Mapping) and "type" in config


def _is_pair(config: Any) -> bool:
    """Return whether a config is a pair of a name and arguments, not a chain of two links."""
    named = is_row(config) and len(config) == 2 and isinstance(config[0], str)
    return named and isinstance(config[1], Mapping) and "type" not in config[1]


def _address(function: Any) -> str:
    """Return the module and the name of a function, such as "torch.nn.functional:relu"."""
    module = getattr(function, "__module__", None)
    for attribute in ("__qualname__", "__name__"):
        address = f"{module}:{getattr(function, attribute, None)}"
        try:
            if _function(address) is function:
                return address
        except (ImportError, AttributeError):
            continue
    raise TypeError(
        f"a config may contain only functions that can be imported by name, got {function!r}: "
        "define the function with def at the top level of a module"
    )


def _function(address: str) -> Any:
    module, _, path = address.partition(":")
    return operator.attrgetter(path)(importlib.import_module(module))
