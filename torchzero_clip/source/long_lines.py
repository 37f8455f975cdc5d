"""Lines of Python, and ways to split a line that is too long."""

from __future__ import annotations

import ast
import re

WIDTH = 88
INDENT = "    "


class Page:
    """The lines of a function that is being written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = 2
        self._loop: tuple[str, int] | None = None
        """The first line and the indentation of the loop around the last line, or None."""

    def fits(self, text: str) -> bool:
        """Return whether a text fits into a line at the current indentation."""
        return len(text) <= WIDTH - len(INDENT) * self.indent

    def line(self, text: str) -> None:
        """Add a line, or several lines that belong together."""
        self._loop = None
        lines = [INDENT * self.indent + part for part in text.split("\n")]
        self.lines += lines if len(lines) > 1 else keyed(lines[0])

    def comment(self, texts: list[str]) -> None:
        """Add the lines of a comment. A loop before the comment can continue after the comment."""
        self.lines += [f"{INDENT * self.indent}# {text}" for text in texts]

    def loop(self, head: str, body: str) -> None:
        """Add a loop with one line, or add the line to the last loop if it has the same head."""
        loop = head, self.indent
        if self._loop != loop:
            self.line(head)
        self.line(INDENT + body)
        self._loop = loop


def keyed(line: str) -> list[str]:
    """Return the line. If a long key makes it too long, first assign the key to a variable."""
    key = re.search(r'"[^"]+"', line)
    if len(line) <= WIDTH or key is None:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return [f"{indent}key = {key[0]}", line.replace(key[0], "key")]


def exploded(text: str) -> str:
    """Return a call with one argument per line."""
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
    """Return Python code with strings in double quotes. No string of a file contains a quote."""
    return text.replace("'", '"')
