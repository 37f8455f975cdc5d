"""Page: lines of Python, and what becomes of one that is too long."""

from __future__ import annotations

import ast
import re

WIDTH = 88
INDENT = "    "


class Page:
    """The lines of a function, which grow at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = 2
        self._loop: tuple[str, int] | None = None  # the head and indent of one that just ended

    def fits(self, text: str) -> bool:
        """Whether a text is a line, as formatters see it."""
        return len(text) <= WIDTH - len(INDENT) * self.indent

    def line(self, text: str) -> None:
        """A line, or several that belong together."""
        self._loop = None
        lines = [INDENT * self.indent + part for part in text.split("\n")]
        self.lines += lines if len(lines) > 1 else keyed(lines[0])

    def comment(self, texts: list[str]) -> None:
        """Lines of a comment, between which and the last line a loop may go on."""
        self.lines += [f"{INDENT * self.indent}# {text}" for text in texts]

    def loop(self, head: str, body: str) -> None:
        """A line in a loop, together with those of the loop before, if that has the same head."""
        here = head, self.indent
        if self._loop != here:
            self.line(head)
        self.line(INDENT + body)
        self._loop = here


def keyed(line: str) -> list[str]:
    """The line, or two where its key makes it too long: one gives the key a name."""
    found = re.search(r'"[^"]+"', line)
    if len(line) <= WIDTH or found is None:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return [f"{indent}key = {found[0]}", line.replace(found[0], "key")]


def exploded(text: str) -> str:
    """A call with an operand a line."""
    tree = ast.parse(text).body[0]
    call = getattr(tree, "value", None)
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    if not isinstance(call, ast.Call) or first is None or isinstance(first, ast.GeneratorExp):
        return text
    parts = [ast.unparse(x) for x in call.args]
    parts += [f"{key.arg}={ast.unparse(key.value)}" for key in call.keywords]
    head = text.encode()[: first.col_offset].decode()
    return "\n".join([head, *[f"{INDENT}{_double(part)}," for part in parts], ")"])


def _double(text: str) -> str:
    """Python with its strings in double quotes; none of ours has a quote in it."""
    return text.replace("'", '"')
