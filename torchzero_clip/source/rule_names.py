"""Naming: values get the names that a rule gives them, which copies of its functions tell."""

from __future__ import annotations
import __future__

import ast
import copy
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torchzero_clip.core import TensorList
from torchzero_clip.core.description import Description
from torchzero_clip.source.functions import codes, node_of
from torchzero_clip.source.operation_recorder import OpRecorder
from torchzero_clip.source.symbols import SourceError

T = TypeVar("T")
TELL = "_naming"
OURS = ("torchzero_clip.core", "torchzero_clip.source", "torch.")


def changed(x: T, **attributes: Any) -> T:
    """A copy of an object, with other attributes."""
    made = copy.copy(x)
    vars(made).update(attributes)
    return made


class RuleNames:
    """Copies of rules whose assignments and loops tell what they call their values.

    Args:
        recorder: What knows the values.
    """

    def __init__(self, recorder: OpRecorder) -> None:
        self.recorder = recorder
        self._copies: dict[FunctionType, FunctionType] = {}

    def tell(self, names: Any, x: Any) -> Any:
        """Give a value its name, or several values theirs, and hand them on."""
        if isinstance(names, tuple):
            for name, one in zip(names, x if isinstance(x, (tuple, list)) else (), strict=False):
                self.tell(name, one)
            return x
        value = self.recorder.knows(x.tensors[0] if isinstance(x, TensorList) and len(x) else x)
        if value is not None and not value.hint and names != "_":
            value.hint = names
        return x

    def each(self, names: Any, some: Iterable[Any]) -> Iterator[Any]:
        """The same for each round of a loop."""
        return (self.tell(names, x) for x in some)

    def copy(self, rule: Description, **attributes: Any) -> Any:
        """A rule, with those in it, and with some attributes of its own."""
        inside = {k: self.copy(x) for k, x in vars(rule).items() if isinstance(x, Description)}
        made, own = changed(rule, **inside), dict[str, Any]()
        for base in reversed(type(rule).__mro__):
            own |= {} if base.__module__.startswith(OURS) else vars(base)
        functions = {k: f for k, f in own.items() if _is_plain(f) and k[:2] != "__"}
        told = {k: MethodType(self.told(f), made) for k, f in functions.items()}
        vars(made).update({**told, **attributes})
        return made

    def told(self, function: FunctionType) -> FunctionType:
        """The same function, which tells what it assigns, as do those that it calls."""
        if function not in self._copies:
            self._copies[function] = function  # as it calls itself
            self._copies[function] = self._told(function)
        return self._copies[function]

    def _told(self, function: FunctionType) -> FunctionType:
        try:
            node = _Telling().visit(node_of(function))
        except SourceError:  # its text cannot be read
            return function
        if not isinstance(node, ast.FunctionDef):
            return function
        code, known = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        cells[TELL] = CellType(self)
        for name in code.co_names:
            if _is_plain(known.get(name)):
                cells[name] = CellType(self.told(known[name]))
        node.decorator_list = []
        owner = ("", *function.__qualname__.split("."))[-2]  # by which names are private
        around = f"def around({', '.join(cells.keys() - {'__class__'})}):\n class "
        tree = ast.parse(f"{around}{owner if owner.isidentifier() else 'Page'}: pass")
        tree.body[0].body[0].body = [node]  # type: ignore[attr-defined]
        ast.fix_missing_locations(tree)
        future = code.co_flags & __future__.annotations.compiler_flag
        whole = compile(tree, code.co_filename, "exec", future, dont_inherit=True)
        made = next(c for c in codes(whole) if c.co_name == code.co_name)
        closure = tuple([cells[name] for name in made.co_freevars])
        told = FunctionType(made, known, code.co_name, function.__defaults__, closure)
        told.__kwdefaults__ = function.__kwdefaults__
        return told


def _is_plain(x: Any) -> bool:
    """Whether it is a function of a rule, or of its page."""
    return isinstance(x, FunctionType) and not x.__module__.startswith(OURS)


class _Telling(ast.NodeTransformer):
    """Assignments and loops of whose values is told what they call them."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return self._told(node, "value", "tell", node.targets[-1])

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._told(node, "iter", "each", node.target)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        return self._told(node, "iter", "each", node.target)

    def _told(self, node: Any, field: str, verb: str, target: ast.expr) -> Any:
        self.generic_visit(node)
        asked = ast.Attribute(ast.Name(TELL, ast.Load()), verb, ast.Load())
        given = [ast.Constant(_names(target)), getattr(node, field)]
        setattr(node, field, ast.Call(asked, given, []))
        return node


def _names(target: ast.expr) -> Any:
    """The name of a target, or those of several."""
    if isinstance(target, ast.Tuple):
        return tuple(map(_names, target.elts))
    return getattr(target, "id", getattr(target, "attr", "_"))
