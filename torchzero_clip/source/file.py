"""The text of a file that imports only torch, written from a recorded step of a chain."""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Chain
from torchzero_clip.core.chain import dissolves
from torchzero_clip.core.formula import formula_of
from torchzero_clip.core.link import Link
from torchzero_clip.core.torch_private import has_foreach
from torchzero_clip.source.averaged import averaged_weights
from torchzero_clip.source.copied_functions import FUNCTIONS, METHODS
from torchzero_clip.source.expressions import by_key
from torchzero_clip.source.lines import Lines
from torchzero_clip.source.long_lines import WIDTH, keyed
from torchzero_clip.source.symbols import SourceError, constant, numbered, quoted
from torchzero_clip.source.written_numbers import WrittenNumber
from torchzero_clip.source.written_step import STAND_INS, WrittenStep, message

ARGUMENTS = ("self", "params", "live", "chain", "torch")
"""Names that mean something else in `__init__` of a file."""
FOREACH_CALL = re.compile(r"torch\._foreach_(\w+)\(")


def to_source(
    chain: Chain, links: Sequence[Link], live: Mapping[str, Any], mark: Sequence[int], name: str
) -> str:
    """Return the text of a file that runs a chain and imports only torch.

    Args:
        chain: The chain, whose repr is in the docstring of the file.
        links: The links of the chain.
        live: The hyperparameters, by their keys in groups.
        mark: The fingerprint of the chain in a checkpoint.
        name: The name of the class.
    """
    if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
        raise ValueError(f"to_source: name must be the name of a class, got {name!r}")
    file = File(chain, links, live, mark, name)
    text = file.text()
    if name in {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}:
        raise ValueError(f"to_source: the file uses {name!r} for something else: pass another name")
    other = File(chain, links, live, mark, name, file.moved()).text()
    if text != other:
        raise SourceError(file.differs(text, other))
    return text


class File:
    """The file of one chain.

    The text of a file must not depend on the numbers in the recorded step. So `to_source` writes
    the file a second time, with other hyperparameters and another stand-in, and compares the two
    texts.

    Args:
        chain: The chain, whose repr is in the docstring of the file.
        links: The links of the chain.
        live: The hyperparameters, by their keys in groups.
        mark: The fingerprint of the chain in a checkpoint.
        name: The name of the class.
        moved: Other hyperparameters for the recorded step, in the second writing.
    """

    def __init__(
        self,
        chain: Chain,
        links: Sequence[Link],
        live: Mapping[str, Any],
        mark: Sequence[int],
        name: str,
        moved: Mapping[str, Any] | None = None,
    ) -> None:
        self.chain = chain
        self.links = links
        self.mark = list(mark)
        self.name = name
        self.defaults = {key: _plain(value) for key, value in live.items()}
        shape, element = STAND_INS[0 if moved is None else 1]
        self.step = WrittenStep(links, shape, element)
        as_number = self.step.recorder.live.value
        values = moved or self.defaults
        self.step.settings = {key: as_number(key, value) for key, value in values.items()}
        ops = self.step.run()
        self.about = {link.path: self._about(link) for top in links for link in top.walk()}
        self.lines = Lines(ops, self.about, self.step.state.texts, self._tuples())
        self.body = self.lines.write()
        self.helpers = self.step.recorder.helpers.texts
        self.checks = list(self._checks())

    def _tuples(self) -> dict[str, list[str]]:
        """Return names for the elements of tuple hyperparameters, if the rules have such names."""
        names_by_key = {}
        for key, value in self.step.settings.items():
            if isinstance(value, tuple):
                names = [x.value.hint if isinstance(x, WrittenNumber) else "" for x in value]
                if any(names):
                    names_by_key[key] = [name or "_" for name in names]
        return names_by_key

    def _about(self, link: Link) -> list[str]:
        """Return the comment above the lines of a link: the path and the formula of the link."""
        text = f"{link.path}: {formula_of(type(link.transform))}"
        indent = 14 + 4 * link.path.count("/")
        return textwrap.wrap(text, 100 - indent, break_long_words=False)

    # ------------------------------------------------------------------ the second writing

    def moved(self) -> dict[str, Any]:
        """Return hyperparameters that differ a little, if they lead to the same decisions."""
        values = {key: _moved(value) for key, value in self.defaults.items()}
        for condition, key in self._decisions():
            if eval(condition, {"group": values, "torch": torch}):
                values[key] = self.defaults[key]
        return values

    def differs(self, text: str, other: str) -> str:
        """Return the error message for the case that the two texts of the file differ."""
        path = ""
        for line, other_line in zip_longest(text.split("\n"), other.split("\n"), fillvalue=""):
            comments = [p for p, lines in self.about.items() if line.strip() == f"# {lines[0]}"]
            state = re.search(r'^ *(?:state\[|key = )"(.+)/[^/]+"', line)
            if comments:
                path = comments[0]
            elif state:
                path = state[1]
            if line != other_line:
                break
        return message(
            path,
            "the transform uses a parameter, the shape of a parameter or a hyperparameter as a "
            f"Python number, so the line {line.strip()!r} would be right for one step only",
        )

    # ------------------------------------------------------------------ text

    def text(self) -> str:
        """Return the text of the whole file."""
        body = "\n".join(self._class())
        functions = self.step.functions
        modules = functions.imports - {"torch"}
        if "math." in "\n".join([body, *self.helpers.values()]):
            modules = modules | {"math"}
        top = [
            *self._docstring(),
            *[f"import {module}" for module in sorted(modules)],
            "from collections.abc import Callable, Iterable",
            "from typing import Any",
            "",
            "import torch",
            "from torch import Tensor",
        ]
        first, *helpers = self._helpers()
        copied = ["\n".join(lines) for lines in functions.texts.values()]
        text = "\n\n\n".join(["\n".join(top), first, *copied, *helpers, body]) + "\n"
        for name in FOREACH_CALL.findall(text):
            if not has_foreach(name):
                missing = f"torch._foreach_{name}, which torch {torch.__version__} does not have"
                raise SourceError(f"to_source: the exported code needs {missing}")
        return text

    def _docstring(self) -> Iterator[str]:
        """Yield the lines of the docstring of the file."""
        chain = _chain([repr(link) for link in _flat(self.chain)])
        if len(chain) == 1:
            yield f'"""{chain[0]} as plain torch.'
        else:
            yield f'"""{chain[0]}'
        yield from chain[1:]
        yield ""
        yield 'Written by torchzero_clip, MIT License; sharded parameters need the library."""'
        yield ""

    def _helpers(self) -> Iterator[str]:
        """Yield the copied functions and the helpers that the step calls. `_tensors` is first."""
        used = "\n".join(self.body)
        for name, text in FUNCTIONS.items():
            if name == "_tensors" or f"{name}(" in used:
                yield text
        yield from self.helpers.values()

    def _class(self) -> Iterator[str]:
        """Yield the lines of the class."""
        yield f"class {self.name}(torch.optim.Optimizer):"
        yield from self._init()
        yield ""
        yield from self._step()
        for number, texts in enumerate(self.step.state.texts.values(), 1):
            yield ""
            yield from self._state(number, texts)
        if method := [*averaged_weights(self.links, self.defaults)]:
            yield from ["", *method]
        used = "\n".join(self.body)
        for name, text in METHODS.items():
            if f"self.{name}(" in used or (name == "load_state_dict" and self.step.state.texts):
                yield ""
                yield from text.split("\n")

    def _init(self) -> Iterator[str]:
        """Yield the lines of `__init__`."""
        yield "    def __init__("
        yield "        self,"
        yield "        params: Iterable[Any],"
        arguments = argument_names([key for key, x in self.defaults.items() if x is not None])
        functions = self.step.functions.arguments
        yield from (f"        {name}: Callable[[str, Tensor], Any]," for name in functions)
        for key, argument in arguments.items():
            value = self.defaults[key]
            yield f"        {argument}: {_type(value)} = {constant(value)},"
        yield "    ) -> None:"
        pairs = [f'"{key}": {arguments.get(key, "None")}' for key in self.defaults]
        line = f"        live = {{{', '.join(pairs)}}}"
        if len(line) <= WIDTH:
            yield line
        else:
            yield "        live = {"
            yield from (f"            {pair}," for pair in pairs)
            yield "        }"
        yield f'        chain = {{"fingerprint": torch.tensor({self.mark})}}'
        yield '        super().__init__(params, {**live, "chain": chain})'
        yield from (f"        self.{name} = {name}" for name in functions)

    def _step(self) -> Iterator[str]:
        """Yield the lines of `step`."""
        yield "    @torch.no_grad()"
        yield "    def step(self, closure: Callable[[], Any] | None = None) -> Any:"
        yield "        loss = None if closure is None else torch.enable_grad()(closure)()"
        yield from self.checks
        if self.lines.joint:
            yield "        if not (groups := [g for g in self.param_groups if _tensors(g)[0]]):"
            yield "            return loss"
            if 'first["' in "\n".join(self.body):
                yield "        first = groups[0]"
        yield from self.body
        yield "        return loss"

    def _decisions(self) -> Iterator[tuple[str, str]]:
        """Yield each condition under which the chain would run other code, and the key it tests."""
        for link in [link for top in self.links for link in top.walk()]:
            for name, key in link.keys.items():
                kind = link.transform._kinds.get(name)
                if self.defaults[key] is None:
                    yield f'group["{key}"] is not None', key
                elif kind is not None and kind.optional and kind.length is None:
                    yield f'group["{key}"] is None', key
        for key, write in self.step.recorder.live.forbidden:
            yield write(by_key), key

    def _checks(self) -> Iterator[str]:
        """Yield the lines that raise an error for hyperparameters that need another file."""
        same = "give all groups the same {key} for this file"
        anew = "write a new file for another {key}"
        other = 'group["{0}"] != self.param_groups[0]["{0}"]'
        checks = [(other.format(key), key, same) for key in self.step.recorder.live.shared]
        checks += [(condition, key, anew) for condition, key in self._decisions()]
        if checks:
            yield "        for group in self.param_groups:"
        for condition, key, text in dict.fromkeys(checks):
            yield f'            key = "{key}"'
            yield f"            if {condition.replace(quoted(key), 'key')}:"
            yield f'                raise ValueError(f"{text}")'

    def _state(self, number: int, texts: dict[str, str]) -> Iterator[str]:
        """Yield the lines of the method that creates state for the parameters of one context."""
        name = "_state" if number == 1 else f"_state_{number}"
        yield f"    def {name}(self, p: Tensor) -> dict[str, Tensor]:"
        yield "        state: dict[str, Tensor] = self.state[p]"
        yield from keyed(f'        if "{next(iter(texts))}" not in state:')
        if any("=dtype" in text or "to(dtype" in text for text in texts.values()):
            yield "            dtype = torch.promote_types(p.dtype, torch.float32)"
        for key, text in texts.items():
            yield from keyed(f'            state["{key}"] = {text}')
        yield "        return state"


def argument_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the names of the arguments of `__init__`, by the key of a group.

    Characters that a Python name cannot have become underscores, because the name of a link may
    contain any characters except a slash.
    """
    names: dict[str, str] = {}
    for key in keys:
        name = "".join([x if f"a{x}".isidentifier() else "_" for x in key])
        if not name.isidentifier():
            name = f"_{name}"
        names[key] = next(x for x in numbered(name) if x not in {*ARGUMENTS, *names.values()})
    return names


def _moved(value: Any) -> Any:
    """Return a number that differs a little. Values that are not numbers stay the same."""
    if isinstance(value, tuple):
        return tuple([_moved(x) for x in value])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int):
        return value + 1
    return value * 1023 / 1024 or 1 / 1024  # 0 becomes a small number


def _flat(chain: Chain) -> Iterator[Any]:
    """Yield the links of a chain, and the links of unnamed chains inside it."""
    for link in chain:
        if isinstance(link, Chain) and dissolves(link):
            yield from _flat(link)
        else:
            yield link


def _chain(links: list[str]) -> list[str]:
    """Return the lines of a chain as code."""
    whole = f"Chain({', '.join(links)})"
    if len(whole) <= WIDTH - 4 - len(" as plain torch."):
        return [whole]
    return ["Chain(", *[f"    {link}," for link in links], ")"]


def _type(value: Any) -> str:
    """Return the type annotation for an argument with this default value."""
    if isinstance(value, tuple):
        return f"tuple[{', '.join([_type(x) for x in value])}]"
    return "int" if type(value) is int else "float"


def _plain(value: Any) -> Any:
    """Return a hyperparameter as a number or a tuple of numbers, without tensors."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(x) for x in value)
    return value
