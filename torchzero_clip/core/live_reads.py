"""Find rules that read a live hyperparameter from `self`.

Such a rule would ignore the values that parameter groups and schedules set.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Collection, Iterator, Set
from types import CodeType

GIVEN_GROUP = (
    "update",
    "update_tensor",
    "limit",
    "observe",
    "observe_matrix",
    "refresh_matrix",
    "advance_group",
    "advance_model",
    "affine",
    "fused",
    "averaged",
)
"""Methods of rules that receive `group`, with the live values of this step."""


def refuse_live_reads(cls: type, live: Collection[str]) -> None:
    """Raise TypeError if a method that receives `group` reads a live field from `self`.

    This function examines the code of these methods, but does not run it. It also examines
    inherited methods, because a subclass may declare an inherited field as live.
    """
    for method, code in _codes(cls):
        name = next(attributes_of(code, code.co_varnames[0], set(live)), None)
        if name is not None:
            raise TypeError(
                f'{cls.__name__}: {method} must read group["{name}"] instead of self.{name}, '
                f"because self.{name} ignores the values in parameter groups and the changes "
                "by schedules"
            )


def refuse_fixed_reads(cls: type, fixed: Collection[str]) -> None:
    """Raise TypeError if a method reads a field from `group`, but the field is no longer live.

    A subclass may declare a live field of its base class again without `Live`. Then `group` does
    not contain the field, so the methods of the base class cannot read it.
    """
    for method, code in _codes(cls):
        name = next((name for name in fixed if name in _constants_of(code)), None)
        if name is not None:
            raise TypeError(
                f'{cls.__name__}: {method} reads group["{name}"], so the field {name} must be a '
                f"live hyperparameter: annotate {name} with Live[...], or define {method} in "
                f"{cls.__name__} and read self.{name}"
            )


def _codes(cls: type) -> Iterator[tuple[str, CodeType]]:
    """Yield the methods that receive `group`, with their code."""
    for method in GIVEN_GROUP:
        attribute = inspect.getattr_static(cls, method, None)
        function = inspect.unwrap(attribute) if callable(attribute) else None
        if inspect.isfunction(function) and function.__code__.co_argcount:
            yield method, function.__code__


def _constants_of(code: CodeType) -> Iterator[object]:
    """Yield the constants in code, also in inner functions."""
    for constant in code.co_consts:
        yield constant
        if isinstance(constant, CodeType):
            yield from _constants_of(constant)


def attributes_of(code: CodeType, variable: str, wanted: Set[str]) -> Iterator[str]:
    """Yield the wanted attributes that code reads of a variable, also in inner functions."""
    if not wanted.isdisjoint(code.co_names):  # most rules end here
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for loaded, used in itertools.pairwise(steps):
            reads = used.opname in ("LOAD_ATTR", "LOAD_METHOD") and used.argval in wanted
            if reads and _loads(loaded, variable):
                yield used.argval
    for inner in code.co_consts:
        # an inner function with an argument of this name does not have it as a free variable
        if isinstance(inner, CodeType) and variable in inner.co_freevars:
            yield from attributes_of(inner, variable, wanted)


def _loads(step: dis.Instruction, variable: str) -> bool:
    """Return whether an instruction loads the variable last.

    Since Python 3.13, one instruction may load two variables.
    """
    name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return name == variable and ("LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF")
