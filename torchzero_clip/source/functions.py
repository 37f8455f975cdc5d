"""Functions of the user that choose parameters, copied into the file."""

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
from torchzero_clip.source.symbols import SourceError, constant, quoted


class Functions:
    """The functions that a file needs, by their names in it.

    Args:
        helpers: Other functions of the file, whose names are taken.
    """

    def __init__(self, helpers: Helpers) -> None:
        self.helpers = helpers
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
        if id(labels) in self.names:
            return self.names[id(labels)]
        rows = [f"    {quoted(key)}: {quoted(label)}," for key, label in labels.items()]
        self.imports.add("re")
        table, name = self._name("LABELS"), self._name("_label")
        self.names[id(labels)] = name
        self.texts[table] = [f"{table} = {{", *rows, "}"]
        self.texts[name] = [
            f"def {name}(name: str, p: Tensor) -> str:",
            '    """The label of a parameter: of its name, or of the first pattern found in it."""',
            f"    if name in {table}:",
            f"        return {table}[name]",
            f"    for key, label in {table}.items():",
            "        if re.search(key, name):",
            "            return label",
            f'    raise ValueError(f"{table} has nothing for the parameter {{name!r}}")',
        ]
        return name

    def _name(self, base: str) -> str:
        """A name that nothing else in the file has."""
        name, count = base, 1
        while name in self.helpers.taken or name in self.helpers.texts:
            count += 1
            name = f"{base}_{count}"
        self.helpers.taken.add(name)
        return name

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
        node = node_of(function)
        if len(node.args.args) != 2 or len(_parameters(node)) != 2:
            raise SourceError(f"the function {function.__name__!r} does not take (name, parameter)")
        written = isinstance(node, ast.FunctionDef)
        name = self._name(f"_{function.__name__.strip('_')}" if written else "_where")
        self.names[id(function)] = name
        self.texts[name] = []
        known = self._outside(function, _names(node, function.__code__), returns)
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
        known = self._outside(function, function.__code__.co_names, "")
        assert all(key == value for key, value in known.items()), "it uses constants of its page"
        self.texts[function.__name__] = lines
        return function.__name__

    def _outside(
        self, function: FunctionType, names: Collection[str], returns: str
    ) -> dict[str, str]:
        """What a function uses of its module and of functions around it, as names in the file."""
        around = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        found: dict[str, str] = {}
        for name in sorted(names):
            if name not in around:
                if returns and not hasattr(builtins, name):
                    raise SourceError(
                        f"the function {function.__name__!r} uses {name!r}, which is not known yet"
                    )
                continue
            value = around[name]
            if isinstance(value, ModuleType) and value.__name__ in ("torch", "math", "re"):
                self.imports.add(value.__name__)
                found[name] = value.__name__
            elif isinstance(value, FunctionType):
                found[name] = self.copy(value, returns and "bool")
            elif isinstance(value, (int, float, str, bool, tuple)) and _plain(value):
                found[name] = constant(value, str)
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


def node_of(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """The tree of a function in its file."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename))
    found: list[ast.FunctionDef | ast.Lambda] = []
    for node in ast.walk(ast.parse(text)) if text else ():
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        first = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
        if first == code.co_firstlineno and _same(node, code):
            found.append(node)
    if len(found) > 1:  # on one line
        found = [node for node in found if _does(node, code)]
    if found:
        return found[0]
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
    names = tuple([a.arg for a in (*node.args.posonlyargs, *node.args.args)])
    kind = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    return names == code.co_varnames[: code.co_argcount] and kind == code.co_name


def _does(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> bool:
    """Whether a tree is that of some code, among what is captured of functions around it."""
    inner = node if isinstance(node, ast.FunctionDef) else ast.Return(node)
    around = ast.parse(f"def around({', '.join(code.co_freevars)}): pass").body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [inner]
    module = compile(ast.fix_missing_locations(ast.Module([around], [])), "", "exec")
    made = [c for c in codes(module) if c.co_name == code.co_name]
    return _said(made[0]) == _said(code)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions in it."""
    yield code
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from codes(x)


def _said(code: CodeType) -> Any:
    """What code does, wherever it stands."""
    constants = [_said(x) if isinstance(x, CodeType) else (type(x), x) for x in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _parameters(node: ast.FunctionDef | ast.Lambda) -> list[ast.arg]:
    """All that a function takes, of every kind."""
    return [x for x in ast.walk(node.args) if isinstance(x, ast.arg)]


def _names(node: ast.FunctionDef | ast.Lambda, code: CodeType) -> set[str]:
    """The names in the body of a function that are not its own."""
    body = node.body if isinstance(node, ast.FunctionDef) else [node.body]
    inside = [x for statement in body for x in ast.walk(statement)]
    own = {*code.co_varnames, *code.co_cellvars}
    own |= {x.arg for x in inside if isinstance(x, ast.arg)}
    own |= {x.id for x in inside if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load)}
    return {x.id for x in inside if isinstance(x, ast.Name)} - own
