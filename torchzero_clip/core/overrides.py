"""Overrides: checks of a new class that overrides methods of its base classes."""

from __future__ import annotations

import inspect

ABOUT_UPDATE = ("fused", "affine", "per_entry")
"""Attributes of transforms by which a class declares what its `update` computes."""
ABOUT_STEP = "reach"
"""The attribute of transforms by which a class declares which tensors its `step` combines."""


def refuse_uncalled(cls: type) -> None:
    """Raise TypeError if a class defines a method that no step would call.

    For example, the `step` of `Identity` does not call `update`, so a subclass with only another
    `update` would do nothing. A `step` outside of this library may call any method.
    """
    declaring: dict[str, type] = {}
    for base in cls.__mro__:
        for name in vars(base).get("_called_by", {}):
            declaring.setdefault(name, base)
    for name, base in declaring.items():
        callers = vars(base)["_called_by"][name]
        default = getattr(base, name)
        owner = next(x for x in cls.__mro__ if any([caller in vars(x) for caller in callers]))
        is_called = name in vars(owner) or getattr(owner, name) is not default
        if getattr(cls, name) is default or is_called or not _is_of_library(owner):
            continue
        library_class = next(x for x in cls.__mro__ if issubclass(x, owner) and _is_of_library(x))
        last = [caller for caller in callers if caller in vars(owner)][-1]
        raise TypeError(
            f"{cls.__name__}: the steps of {library_class.__name__} do not call {name}: define "
            f"{vars(owner).get('_advised', last)} instead, or put a second transform after "
            f"{library_class.__name__}"
        )


def drop_declarations(cls: type) -> None:
    """Drop inherited declarations about a method that a class overrides.

    An engine would otherwise run the `fused` or `affine` of a base class instead of `update`. The
    `fused` of a base class is also dropped if the class has another `init`, because the state that
    `fused` names may be missing.

    Raise TypeError if a class declares something about `update`, but inherits `update` itself. Only
    some engines would use the declaration.
    """
    update = min(_depth(cls, "update"), _depth(cls, "update_tensor"))
    for name in ABOUT_UPDATE:
        default = _most_general(cls, name)
        if vars(cls.__mro__[_depth(cls, name)])[name] == default:
            continue
        reads_state = name == "fused" and _depth(cls, name) > _depth(cls, "init")
        if _depth(cls, name) > update or reads_state:
            setattr(cls, name, default)
        elif _depth(cls, name) < update:
            raise TypeError(
                f"{cls.__name__}: {name} describes the method update, so a class that defines "
                f"{name} must define update as well"
            )
    has_other_step = _depth(cls, ABOUT_STEP) > _depth(cls, "step")
    if has_other_step and inspect.getattr_static(cls, ABOUT_STEP) == "tensor":
        setattr(cls, ABOUT_STEP, _most_general(cls, ABOUT_STEP))


def _depth(cls: type, name: str) -> int:
    """Return the position of the class that defines an attribute, in the order of base classes."""
    bases = cls.__mro__
    return next((i for i, base in enumerate(bases) if name in vars(base)), len(bases))


def _most_general(cls: type, name: str) -> object:
    """Return an attribute as the most general base class defines it."""
    return next(vars(base)[name] for base in reversed(cls.__mro__) if name in vars(base))


def _is_of_library(cls: type) -> bool:
    """Return whether a class is defined in this library."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]
