"""Functions of the user that choose parameters, copied into the file."""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import tokenize
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torchzero_clip.source.values import SourceError, quoted


class Functions:
    """The functions that a file needs, by their names in it."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}  # by name: the lines before formatting
        self.names: dict[int, str] = {}
        self.imports: set[str] = set()
        self.given: list[str] = []  # what the class takes of the user

    def asked(self, name: str) -> str:
        """A function that is given to the class, since it knows tensors of the model."""
        if name in self.given:
            raise SourceError(f"two links have a function {name}")
        self.given.append(name)
        return f"self.{name}"

    def flag(self, where: Any) -> str:
        """The flags of parameters where a condition holds."""
        name = self.copy(where, "bool")
        return f"[{name}(*named) for named in _named(group)]"

    def label(self, labels: Any, label: str) -> str:
        """The flags of parameters with a label."""
        if isinstance(labels, Mapping):
            name = self._table(labels)
        else:
            name = self.copy(labels, "str")
        return f"[{name}(*named) == {quoted(label)} for named in _named(group)]"

    def _table(self, labels: Mapping[str, str]) -> str:
        rows = [f"    {quoted(key)}: {quoted(label)}," for key, label in labels.items()]
        self.imports.add("re")
        self.texts["LABELS"] = ["LABELS = {", *rows, "}"]
        self.texts["_label"] = [
            "def _label(name: str, p: Tensor) -> str:",
            '    """The label of a parameter: of its name, or of the first pattern found in it."""',
            "    if name in LABELS:",
            "        return LABELS[name]",
            "    for key, label in LABELS.items():",
            "        if re.search(key, name):",
            "            return label",
            '    raise ValueError(f"LABELS has nothing for the parameter {name!r}")',
        ]
        return "_label"

    def copy(self, function: Any, returns: str = "") -> str:
        """The name of a function in the file, whose text is read from where it is defined.

        With `returns`, it takes a name and a parameter; else it is one of ours.
        """
        if id(function) in self.names:
            return self.names[id(function)]
        if not isinstance(function, FunctionType):
            raise SourceError(f"{function!r} is no function that Python code defines")
        if not returns:
            return self._verbatim(function)
        node = _node(function)
        if len(node.args.args) != 2:
            raise SourceError(f"the function {function.__name__!r} does not take (name, parameter)")
        name = (
            f"_{function.__name__.strip('_')}" if isinstance(node, ast.FunctionDef) else "_chosen"
        )
        while name in self.texts:
            name += "_2"
        self.names[id(function)] = name
        self.texts[name] = []
        known = self._outside(function, returns)
        args = [a.arg for a in node.args.args]
        head = f"def {name}({args[0]}: str, {args[1]}: Tensor) -> {returns}:"
        body = node.body if isinstance(node, ast.FunctionDef) else [ast.Return(node.body)]
        tree = [_Renamed(known).visit(statement) for statement in body]
        if ast.get_docstring(node) is None if isinstance(node, ast.FunctionDef) else True:
            head += '\n    """Which parameters it is."""'
        lines = _quoted("\n".join([ast.unparse(ast.fix_missing_locations(x)) for x in tree]))
        self.texts[name] = [*head.split("\n"), *[f"    {line}" for line in lines.split("\n")]]
        return name

    def _verbatim(self, function: FunctionType) -> str:
        """The name of a function at the top of a page of ours, as it stands there."""
        lines = inspect.getsource(function).rstrip().split("\n")
        known = self._outside(function, "")
        assert all(key == value for key, value in known.items()), "it uses constants of its page"
        self.texts[function.__name__] = lines
        return function.__name__

    def _outside(self, function: FunctionType, returns: str) -> dict[str, str]:
        """What a function uses of its module, as names in the file."""
        captured = inspect.getclosurevars(function)
        found: dict[str, str] = {}
        for name, value in {**captured.globals, **captured.nonlocals}.items():
            if isinstance(value, ModuleType) and value.__name__ in ("torch", "math", "re"):
                self.imports.add(value.__name__)
                found[name] = value.__name__
            elif isinstance(value, FunctionType):
                found[name] = self.copy(value, returns and "bool")
            elif isinstance(value, (int, float, str, bool, tuple)) and _plain(value):
                found[name] = repr(value)
            else:
                raise SourceError(
                    f"the function {function.__name__!r} uses {name!r}, which is no plain value"
                )
        return found


def _plain(x: Any) -> bool:
    if isinstance(x, tuple):
        return all(map(_plain, x))
    return isinstance(x, (int, float, str, bool))


class _Renamed(ast.NodeTransformer):
    """Names by what they are in the file."""

    def __init__(self, known: dict[str, str]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.known:
            return ast.parse(self.known[node.id], mode="eval").body
        return node


def _node(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """The tree of a function in its file."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename))
    for node in ast.walk(ast.parse(text)) if text else ():
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
        if first == code.co_firstlineno and _same(node, code):
            return node
    raise SourceError(
        f"the text of the function {function.__name__!r} cannot be read: define it with def, at "
        "the top of a module"
    )


def _quoted(text: str) -> str:
    """Python with strings in double quotes, as formatters write them."""
    lines = text.split("\n")
    for token in reversed([*tokenize.generate_tokens(io.StringIO(text).readline)]):
        plain = token.string.startswith("'") and not {'"', "\\"} & set(token.string)
        if token.type == tokenize.STRING and plain and token.start[0] == token.end[0]:
            row, line = token.start[0] - 1, lines[token.start[0] - 1]
            inner = f'"{token.string[1:-1]}"'
            lines[row] = line[: token.start[1]] + inner + line[token.end[1] :]
    return "\n".join(lines)


def _same(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> bool:
    names = tuple(a.arg for a in node.args.args)
    return names == code.co_varnames[: code.co_argcount]
