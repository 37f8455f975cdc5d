"""File: the text of an optimizer of plain torch, from a step of a chain that is written down."""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import Chain
from torchzero_clip.core.formula import formula_of
from torchzero_clip.core.link import Link
from torchzero_clip.core.torch_private import has_foreach
from torchzero_clip.source.averaged import averaged_weights
from torchzero_clip.source.copied_functions import FUNCTIONS, METHODS
from torchzero_clip.source.expressions import by_key
from torchzero_clip.source.lines import Lines
from torchzero_clip.source.long_lines import WIDTH, keyed
from torchzero_clip.source.symbols import Context, SourceError, Value, constant, quoted
from torchzero_clip.source.written_step import STAND_INS, WrittenStep, sentence

CALLED = re.compile(r"torch\._foreach_(\w+)\(")


def to_source(
    chain: Chain, links: Sequence[Link], live: Mapping[str, Any], mark: Sequence[int], name: str
) -> str:
    """A chain as a file.

    Args:
        chain: What the file says of where it came from.
        links: The links that the chain is bound to.
        live: The live values, by their keys in groups.
        mark: What tells the chain from others in a checkpoint.
        name: What the class is called.
    """
    if not (isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)):
        raise ValueError(f"to_source: name must be the name of a class, got {name!r}")
    file = File(chain, links, live, mark, name)
    text, other = file.text(), File(chain, links, live, mark, name, file.moved()).text()
    if text != other:
        raise SourceError(file.differs(text, other))
    return text


class File:
    """The file of one chain; the arguments are those of `to_source`.

    What stands in a file may hang on no number of the step that was watched: written a second time,
    with `moved` live values and for another stand-in of parameters, it has the same text.
    """

    def __init__(
        self,
        chain: Chain,
        links: Sequence[Link],
        live: Mapping[str, Any],
        mark: Any,
        name: str,
        moved: Mapping[str, Any] | None = None,
    ) -> None:
        self.chain, self.links, self.mark, self.name = chain, links, list(mark), name
        self.defaults = {key: _plain(value) for key, value in live.items()}
        self.step = WrittenStep(links, {}, *STAND_INS[moved is not None])
        number, values = self.step.recorder.live.value, moved or self.defaults
        self.step.settings = {key: number(key, value) for key, value in values.items()}
        ops = self.step.run()
        self.about = {link.path: self._about(link) for top in links for link in top.walk()}
        self.lines = Lines(ops, self.about, self.step.state.texts, self._tuples())
        self.body = self.lines.write()
        self.helpers = self.step.recorder.helpers.texts
        self.checks = list(self._checks())

    def _tuples(self) -> dict[str, list[str]]:
        """The names of tuples of live values, where the rules give them some."""
        found = {}
        for key, value in self.step.settings.items():
            if isinstance(value, tuple):
                names = [getattr(x, "value", Value("number")).hint or "_" for x in value]
                if any(name != "_" for name in names):
                    found[key] = names
        return found

    def _about(self, link: Link) -> list[str]:
        """The comment above the lines of a link: its name and formula."""
        text = f"{link.path}: {formula_of(type(link.transform))}"
        indent = 14 + 4 * link.path.count("/")
        return textwrap.wrap(text, 100 - indent, break_long_words=False)

    # ------------------------------------------------------------------ the same for others

    def moved(self) -> dict[str, Any]:
        """Live values a little off, but for those by which the chain decides otherwise then."""
        values = {key: _moved(value) for key, value in self.defaults.items()}
        for condition, key in self._kinds():
            if eval(condition, {"group": values, "torch": torch}):
                values[key] = self.defaults[key]
        return values

    def differs(self, text: str, other: str) -> str:
        """What an error says of two texts that should be one."""
        link = ""
        for mine, theirs in zip_longest(text.split("\n"), other.split("\n"), fillvalue=""):
            heads = [path for path, lines in self.about.items() if mine.strip() == f"# {lines[0]}"]
            held = re.search(r'^ *(?:state\[|key = )"(.+)/[^/]+"', mine)
            link = heads[0] if heads else held[1] if held else link
            if mine != theirs:
                break
        return sentence(
            link,
            f"its line {mine.strip()!r} holds a number that only the watched step had, read from a "
            "parameter, its shape or a live value as a number of Python",
        )

    # ------------------------------------------------------------------ text

    def text(self) -> str:
        """The whole file."""
        body = [*self._class()]
        code = "\n".join(body) + "\n".join(self.helpers.values())
        functions = self.step.functions
        modules = sorted({"torch"} | functions.imports | ({"math"} if "math." in code else set()))
        plain = [f"import {m}" for m in modules if m != "torch"]
        top = [
            *self._head(),
            *plain,
            "from collections.abc import Callable, Iterable",
            "from typing import Any",
            "",
        ]
        top += ["import torch", "from torch import Tensor"]
        first, *helpers = [text for text in self._helpers() if text]
        blocks = [first, *["\n".join(lines) for lines in functions.texts.values()], *helpers]
        blocks = [text for text in blocks if text]
        blocks += ["\n".join(body)]
        text = "\n\n\n".join(["\n".join(top), *blocks]) + "\n"
        for name in CALLED.findall(text):
            if not has_foreach(name):
                gone = f"torch._foreach_{name}, which torch {torch.__version__} does not have"
                raise SourceError(f"the file would call {gone}")
        return text

    def _head(self) -> Iterator[str]:
        chain = _chain([repr(link) for link in _flat(self.chain)])
        yield f'"""{chain[0]}' + (" as plain torch." if len(chain) == 1 else "")
        yield from chain[1:]
        yield ""
        yield 'Written by torchzero_clip, MIT License; sharded parameters need the library."""'
        yield ""

    def _helpers(self) -> Iterator[str]:
        used = "\n".join(self.body)
        for name, text in FUNCTIONS.items():
            if name == "_tensors" or f"{name}(" in used:
                yield text
        yield from self.helpers.values()

    def _class(self) -> Iterator[str]:
        yield f"class {self.name}(torch.optim.Optimizer):"
        yield from self._init()
        yield ""
        yield from self._step()
        for number, (context, made) in enumerate(self.step.state.texts.items(), 1):
            yield ""
            yield from self._state(number, context, made)
        if method := [*averaged_weights(self.links, self.defaults)]:
            yield from ["", *method]
        used = "\n".join(self.body)
        for name, text in METHODS.items():
            if f"self.{name}(" in used or (name == "load_state_dict" and self.step.state.texts):
                yield ""
                yield from text.split("\n")

    def _init(self) -> Iterator[str]:
        yield "    def __init__("
        yield "        self,"
        yield "        params: Iterable[Any],"
        arguments = {
            key: key.replace("/", "_") for key, x in self.defaults.items() if x is not None
        }
        given = self.step.functions.given
        yield from (f"        {name}: Callable[[str, Tensor], Any]," for name in given)
        for key, argument in arguments.items():
            value = self.defaults[key]
            yield f"        {argument}: {_type(value)} = {constant(value, str)},"
        yield "    ) -> None:"
        pairs = [f'"{key}": {arguments.get(key, "None")}' for key in self.defaults]
        one = f"        live = {{{', '.join(pairs)}}}"
        if len(one) <= WIDTH:
            yield one
        else:
            yield "        live = {"
            yield from (f"            {pair}," for pair in pairs)
            yield "        }"
        yield f'        chain = {{"fingerprint": torch.tensor({self.mark})}}'
        yield '        super().__init__(params, {**live, "chain": chain})'
        yield from (f"        self.{name} = {name}" for name in given)

    def _step(self) -> Iterator[str]:
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

    def _kinds(self) -> Iterator[tuple[str, str]]:
        """What live values may not be, since the chain decides by them, and their keys."""
        for link in [link for top in self.links for link in top.walk()]:
            for name, key in link.keys.items():
                none, kind = self.defaults[key] is None, link.transform._kinds.get(name)
                if none or (kind is not None and kind.optional and kind.length is None):
                    yield f'group["{key}"] is {"not " * none}None', key
        for key, write in self.step.recorder.live.broken:
            yield write(by_key)[0], key

    def _checks(self) -> Iterator[str]:
        """The lines that refuse live values of another kind, and several where one is taken."""
        same = "give all groups the same {key} for this file"
        anew = "write this file anew for another {key}"
        other = 'group["{0}"] != self.param_groups[0]["{0}"]'
        rows = [(other.format(key), key, same) for key in self.step.recorder.live.shared]
        rows += [(*row, anew) for row in self._kinds()]
        if rows:
            yield "        for group in self.param_groups:"
        for condition, key, way in dict.fromkeys(rows):
            yield f'            key = "{key}"'
            yield f"            if {condition.replace(quoted(key), 'key')}:"
            yield f'                raise ValueError(f"{way}")'

    def _state(self, number: int, context: Context, made: dict[str, str]) -> Iterator[str]:
        name = "_state" if number == 1 else f"_state_{number}"
        yield f"    def {name}(self, p: Tensor) -> dict[str, Tensor]:"
        yield "        state: dict[str, Tensor] = self.state[p]"
        yield from keyed(f'        if "{next(iter(made))}" not in state:')
        if any("=dtype" in text or "to(dtype" in text for text in made.values()):
            yield "            dtype = torch.promote_types(p.dtype, torch.float32)"
        for key, text in made.items():
            yield from keyed(f'            state["{key}"] = {text}')
        yield "        return state"


def _moved(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple([_moved(x) for x in value])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return value + 1 if isinstance(value, int) else value * 1023 / 1024 or 1 / 1024


def _flat(chain: Chain) -> Iterator[Any]:
    """The links of a chain; unnamed chains in it dissolve."""
    for link in chain:
        if isinstance(link, Chain) and link.name is None:
            yield from _flat(link)
        else:
            yield link


def _chain(links: list[str]) -> list[str]:
    """The links of a chain, as one would write them."""
    whole = f"Chain({', '.join(links)})"
    if len(whole) <= WIDTH - 4 - len(" as plain torch."):
        return [whole]
    return ["Chain(", *[f"    {link}," for link in links], ")"]


def _type(value: Any) -> str:
    if isinstance(value, tuple):
        return f"tuple[{', '.join([_type(x) for x in value])}]"
    return "int" if type(value) is int else "float"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(_plain(x) for x in value)
    return value
