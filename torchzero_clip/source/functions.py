"""The user's functions that select parameters. Their source is copied into the file."""

from __future__ import annotations

import ast
import builtins
import inspect
import io
import linecache
import tokenize
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torchzero_clip.source.helpers import Helpers
from torchzero_clip.source.symbols import SourceError, constant, numbered, quoted


class Functions:
    """The functions that a file copies, by their names in the file.

    Args:
        helpers: The helpers of the file. Copied functions get other names.
    """

    def __init__(self, helpers: Helpers) -> None:
        self.helpers = helpers
        self.texts: dict[str, list[str]] = {}
        """The lines of each function, by name."""
        self.names: dict[int, str] = {}
        """The name of each function or table in the file, by the id of the original object."""
        self.imports: set[str] = set()
        """The modules that the functions use."""
        self.arguments: list[str] = []
        """The functions that the user passes to the class."""

    def argument(self, name: str) -> str:
        """Return the text of a function that the user passes to the class.

        Such a function reads tensors of the model, so its source cannot be copied.
        """
        if name in self.arguments:
            raise SourceError(f"two transforms have a function as their argument {name}")
        self.arguments.append(name)
        return f"self.{name}"

    def flags(self, where: Any) -> str:
        """Return the text of the flags that tell for which parameters a condition holds."""
        name = self.copy(where, "bool")
        return f"[{name}(*named) for named in _named(group)]"

    def label_flags(self, labels: Any, label: str) -> str:
        """Return the text of the flags that tell which parameters have a label."""
        if isinstance(labels, Mapping):
            name = self._table(labels)
        else:
            name = self.copy(labels, "str")
        return f"[{name}(*named) == {quoted(label)} for named in _named(group)]"

    def _table(self, labels: Mapping[str, str]) -> str:
        """Return the name of a function that returns a parameter's label from a table."""
        if id(labels) in self.names:
            return self.names[id(labels)]
        entries = [f"    {quoted(key)}: {quoted(label)}," for key, label in labels.items()]
        self.imports.add("fnmatch")
        table = self._name("LABELS")
        name = self._name("_label")
        self.names[id(labels)] = name
        self.texts[table] = [f"{table} = {{", *entries, "}"]
        self.texts[name] = [
            f"def {name}(name: str, p: Tensor) -> str:",
            '    """Return the label of a name, or of the first pattern that matches it."""',
            f"    if name in {table}:",
            f"        return {table}[name]",
            f"    for key, label in {table}.items():",
            '        parts = [part.strip() for part in key.split("|")]',
            "        if any(fnmatch.fnmatchcase(name, part) for part in parts):",
            "            return label",
            f'    raise ValueError(f"{table} has no key for the parameter {{name!r}}")',
        ]
        return name

    def _name(self, base: str) -> str:
        """Return a name that the file does not use yet."""
        known = self.helpers.taken | self.helpers.texts.keys()
        name = next(x for x in numbered(base) if x not in known)
        self.helpers.taken.add(name)
        return name

    def copy(self, function: Any, returns: str = "") -> str:
        """Copy the source of a function into the file, and return its name there.

        Args:
            function: The function.
            returns: The return type of a user's function, whose arguments are (name, parameter).
                The default is for functions of this library.
        """
        if id(function) in self.names:
            return self.names[id(function)]
        if not isinstance(function, FunctionType):
            raise SourceError(f"{function!r} is not a Python function with source code")
        if not returns:
            return self._verbatim(function)
        node = node_of(function)
        if len(node.args.args) != 2 or len(_parameters(node)) != 2:
            raise SourceError(
                f"the function {function.__name__!r} must have two arguments, a name and a "
                "parameter"
            )
        written = isinstance(node, ast.FunctionDef)
        name = self._name(f"_{function.__name__.strip('_')}" if written else "_where")
        self.names[id(function)] = name
        self.texts[name] = []
        known = self._outside(function, _names(node, function.__code__), returns)
        args = [a.arg for a in node.args.args]
        head = [f"def {name}({args[0]}: str, {args[1]}: Tensor) -> {returns}:"]
        if not isinstance(node, ast.FunctionDef):
            body: list[ast.stmt] = [ast.Return(node.body)]
            documented = False
        else:
            body = node.body
            documented = ast.get_docstring(node) is not None
        if not documented:
            label = returns == "str"
            about = "the label of a parameter" if label else "whether a parameter is selected"
            head.append(f'    """Return {about}."""')
        tree = [_Renamed(known).visit(statement) for statement in body]
        text = "\n".join([ast.unparse(ast.fix_missing_locations(x)) for x in tree])
        lines = _with_double_quotes(text).split("\n")
        self.texts[name] = [*head, *[f"    {line}" for line in lines]]
        return name

    def _verbatim(self, function: FunctionType) -> str:
        """Copy a function of this library without changes, and return its name."""
        lines = inspect.getsource(function).rstrip().split("\n")
        known = self._outside(function, function.__code__.co_names, "")
        assert all(key == value for key, value in known.items()), "it uses constants of its page"
        self.texts[function.__name__] = lines
        return function.__name__

    def _outside(
        self, function: FunctionType, names: Collection[str], returns: str
    ) -> dict[str, str]:
        """Return the text that replaces each global or nonlocal name that a function uses."""
        around = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        texts: dict[str, str] = {}
        for name in sorted(names):
            if name not in around:
                if returns and not hasattr(builtins, name):
                    raise SourceError(
                        f"the function {function.__name__!r} uses {name!r}, which is not defined"
                    )
                continue
            value = around[name]
            if isinstance(value, ModuleType) and value.__name__ in ("torch", "math", "re"):
                self.imports.add(value.__name__)
                texts[name] = value.__name__
            elif isinstance(value, FunctionType):
                texts[name] = self.copy(value, "bool" if returns else "")
            elif _is_plain(value):
                texts[name] = constant(value)
            else:
                raise SourceError(
                    f"the function {function.__name__!r} uses {name!r}, which must be a "
                    "number, a string or a function"
                )
        return texts


def _is_plain(x: Any) -> bool:
    """Return whether a value is a literal: a number, a string, or a tuple of literals."""
    if isinstance(x, tuple):
        return all(map(_is_plain, x))
    return isinstance(x, (int, float, str, bool))


class _Renamed(ast.NodeTransformer):
    """Replaces names in a syntax tree by other texts."""

    def __init__(self, known: dict[str, str]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.known:
            return ast.parse(self.known[node.id], mode="eval").body
        return node


def node_of(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """Return the syntax tree of a function, from the file that defines it."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename))
    nodes: list[ast.FunctionDef | ast.Lambda] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
        if first == code.co_firstlineno and _has_name_and_arguments(node, code):
            nodes.append(node)
    if len(nodes) > 1:  # several functions are defined on one line
        nodes = [node for node in nodes if _compiles_to(node, code)]
    if nodes:
        return nodes[0]
    raise SourceError(
        f"the source code of the function {function.__name__!r} cannot be read: define the "
        "function with def at the top level of a module"
    )


def _with_double_quotes(text: str) -> str:
    """Return Python code whose strings have double quotes, as formatters write strings."""
    lines = text.split("\n")
    for token in reversed([*tokenize.generate_tokens(io.StringIO(text).readline)]):
        plain = token.string.startswith("'") and not {'"', "\\"} & set(token.string)
        if token.type == tokenize.STRING and plain and token.start[0] == token.end[0]:
            row = token.start[0] - 1
            line = lines[row]
            inner = f'"{token.string[1:-1]}"'
            lines[row] = line[: token.start[1]] + inner + line[token.end[1] :]
    return "\n".join(lines)


def _has_name_and_arguments(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> bool:
    """Return whether a syntax tree has the same name and arguments as a code object."""
    names = tuple([a.arg for a in (*node.args.posonlyargs, *node.args.args)])
    kind = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    return names == code.co_varnames[: code.co_argcount] and kind == code.co_name


def _compiles_to(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> bool:
    """Return whether a syntax tree compiles to the same instructions as a code object."""
    inner = node if isinstance(node, ast.FunctionDef) else ast.Return(node)
    around = ast.parse(f"def around({', '.join(code.co_freevars)}): pass").body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [inner]
    module = compile(ast.fix_missing_locations(ast.Module([around], [])), "", "exec")
    compiled = next(c for c in codes(module) if c.co_name == code.co_name)
    return _instructions(compiled) == _instructions(code)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and the code objects of the functions inside."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from codes(x)


def _instructions(code: CodeType) -> Any:
    """Return the instructions and constants of a code object, without line numbers."""
    constants = [
        _instructions(x) if isinstance(x, CodeType) else (type(x), x) for x in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _parameters(node: ast.FunctionDef | ast.Lambda) -> list[ast.arg]:
    """Return all parameters of a function, including keyword-only parameters and `*args`."""
    return [x for x in ast.walk(node.args) if isinstance(x, ast.arg)]


def _names(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> set[str]:
    """Return the names that the body of a function uses but does not define."""
    body = node.body if isinstance(node, ast.FunctionDef) else [node.body]
    inside = [x for statement in body for x in ast.walk(statement)]
    own = {*code.co_varnames, *code.co_cellvars}
    own |= {x.arg for x in inside if isinstance(x, ast.arg)}
    own |= {x.id for x in inside if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load)}
    return {x.id for x in inside if isinstance(x, ast.Name)} - own
