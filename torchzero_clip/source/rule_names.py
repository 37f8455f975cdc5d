"""Copies of rules that report their variable names. Values in the file get these names."""

from __future__ import annotations
import __future__

import ast
import copy
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torchzero_clip.core import TensorList
from torchzero_clip.core.description import Description
from torchzero_clip.source.functions import codes, node_of
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import SourceError

T = TypeVar("T")
REPORTER = "_naming"
"""The variable through which a copied function reaches the `RuleNames` object."""
NOT_RULES = ("torchzero_clip.core", "torchzero_clip.source", "torch.")
"""Modules whose functions are not copied, because they contain no rules."""


def changed(x: T, **attributes: Any) -> T:
    """Return a copy of an object whose attributes have the given values."""
    assert all(hasattr(x, name) for name in attributes)
    other = copy.copy(x)
    vars(other).update(attributes)
    return other


class RuleNames:
    """Copies rules. Assignments and loops in the copies report the names of variables.

    Args:
        recorder: The recorder, which knows the value of each tensor and number.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self.recorder = recorder
        self._copies: dict[FunctionType, FunctionType] = {}

    def named(self, names: Any, x: Any) -> Any:
        """Give a name to the value that x represents, and return x.

        Args:
            names: The name of the variable, or a tuple of names if x is unpacked.
            x: The object that the rule assigns.
        """
        if isinstance(names, tuple):
            if isinstance(x, (tuple, list)):
                for name, item in zip(names, x, strict=False):
                    self.named(name, item)
            return x
        value = self.recorder.knows(x.tensors[0] if isinstance(x, TensorList) and len(x) else x)
        if value is not None and not value.hint and names != "_":
            value.hint = names
        return x

    def each_named(self, names: Any, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, and give the name of the loop variable to each."""
        return (self.named(names, x) for x in items)

    def copy(self, rule: Description, **attributes: Any) -> Any:
        """Return a copy of a rule, with copies of inner rules. The copied methods report names.

        Args:
            rule: The rule.
            **attributes: Other attributes for the copy.
        """
        inside = {k: self.copy(x) for k, x in vars(rule).items() if isinstance(x, Description)}
        reporting = changed(rule, **inside)
        members: dict[str, Any] = {}
        for base in reversed(type(rule).__mro__):
            if not base.__module__.startswith(NOT_RULES):
                members |= vars(base)
        for name, member in members.items():
            if _is_of_rule(member) and not name.startswith("__"):
                vars(reporting)[name] = MethodType(self.reporting(member), reporting)
        vars(reporting).update(attributes)
        return reporting

    def reporting(self, function: FunctionType) -> FunctionType:
        """Return a copy of a function. The copy, and all functions it calls, report names."""
        if function not in self._copies:
            self._copies[function] = function  # the function may call itself
            self._copies[function] = self._reporting(function)
        return self._copies[function]

    def _reporting(self, function: FunctionType) -> FunctionType:
        """Return a copy that reports names, or the function itself if its source is not known."""
        try:
            node = _Reporting().visit(node_of(function))
        except SourceError:  # the source of the function is not available
            return function
        if not isinstance(node, ast.FunctionDef):
            return function
        code = function.__code__
        module = function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        cells[REPORTER] = CellType(self)
        for name in code.co_names:
            if _is_of_rule(module.get(name)):
                cells[name] = CellType(self.reporting(module[name]))
        node.decorator_list = []
        # private names of a method, such as __x, depend on the name of its class
        owner = ("", *function.__qualname__.split("."))[-2]
        if not owner.isidentifier():
            owner = "Page"
        arguments = ", ".join(cells.keys() - {"__class__"})
        tree = ast.parse(f"def around({arguments}):\n class {owner}: pass")
        tree.body[0].body[0].body = [node]  # type: ignore[attr-defined]
        ast.fix_missing_locations(tree)
        future = code.co_flags & __future__.annotations.compiler_flag
        whole = compile(tree, code.co_filename, "exec", future, dont_inherit=True)
        new_code = next(c for c in codes(whole) if c.co_name == code.co_name)
        closure = tuple([cells[name] for name in new_code.co_freevars])
        reporting = FunctionType(new_code, module, code.co_name, function.__defaults__, closure)
        reporting.__kwdefaults__ = function.__kwdefaults__
        return reporting


def _is_of_rule(x: Any) -> bool:
    """Return whether an object is a method of a rule, or a function in a module with rules."""
    return isinstance(x, FunctionType) and not x.__module__.startswith(NOT_RULES)


class _Reporting(ast.NodeTransformer):
    """Rewrites assignments and loops, so that they report the names of their variables."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._report(node, "value", RuleNames.named, node.targets[-1])

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._report(node, "iter", RuleNames.each_named, node.target)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        return self._report(node, "iter", RuleNames.each_named, node.target)

    def _report(self, node: Any, field: str, method: Callable[..., Any], target: ast.expr) -> Any:
        """Wrap an expression of a syntax tree node in a call of a `RuleNames` method."""
        self.generic_visit(node)
        function = ast.Attribute(ast.Name(REPORTER, ast.Load()), method.__name__, ast.Load())
        arguments = [ast.Constant(_names(target)), getattr(node, field)]
        setattr(node, field, ast.Call(function, arguments, []))
        return node


def _names(target: ast.expr) -> Any:
    """Return the name of an assignment target, or a tuple of names."""
    if isinstance(target, ast.Tuple):
        return tuple(map(_names, target.elts))
    return getattr(target, "id", getattr(target, "attr", "_"))
