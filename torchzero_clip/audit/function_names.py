"""Import functions by name, and return the names by which another process can import them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which another process imports a function."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", "<")
    if module is None or "<" in name:
        raise TypeError(
            "audit_clip: function must be defined with `def` at the top level of a module, "
            f"so that the processes of the audit can import the function, got {function!r}"
        )
    if module == "__main__":
        module = inspect.getfile(function)
    return f"{module}:{name}"


def function_named(name: str) -> Callable[..., Any]:
    """Import the function with a name such as "package.module:name" or "file.py:name"."""
    home, _, path = name.rpartition(":")
    if not home or not path:
        raise ValueError(
            f"the name of a function must be package.module:name or file.py:name, got {name!r}"
        )
    if home.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(home).stem, home)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(home)
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {value!r}")
    function: Callable[..., Any] = value
    return function
