"""Expressions: operations as expressions of Python, with what is used once written inside."""

from __future__ import annotations

from collections.abc import Iterator

from torchzero_clip.source.symbols import Op, Value
from torchzero_clip.source.value_names import Naming

LETTERS = {"params": "p", "grads": "g", "layer": "k"}
UNNAMED = "\0"
"""In a text: a list needs a name before it can be put together with those of other groups."""


class Expressions:
    """What operations and values are in a line.

    Args:
        names: The names of values.
        inline: The values that are written where they are used.
    """

    def __init__(self, names: Naming, inline: set[Value]) -> None:
        self.names, self.inline = names, inline
        self.unpacked: dict[str, list[str]] = {}  # names for the parts of live tuples, by key

    def statement(self, op: Op) -> str:
        """The operation, with the name that its result gets."""
        text = self.of(op)
        if op.out is None:
            return text
        name = self.names.of(op.out)
        if op.out.kind == "list" and self.names.kinds[name] != op.out.elements:
            text = f"tuple({text[1:-1]})"  # of its name, which was a tuple before
        return f"{name} = {text}"

    def of(self, op: Op) -> str:
        """The operation, or the head of a loop and the line in it."""
        if op.gathers:
            return self._all(op.args[0])
        return self._over(op) if op.each else op.write(self.text)[0]

    def text(self, value: Value) -> str:
        """A value where it is used."""
        if value.live is not None:
            return self.live(value)
        if value in self.inline and value.made is not None:
            return self.of(value.made)
        return self.names.of(value)

    def live(self, value: Value) -> str:
        """A live value, by the name that the step gives it or by its key."""
        assert value.live is not None
        key, index = value.live
        names = self.unpacked.get(key)
        name = "_" if index is None or names is None else names[index]
        return by_key(value) if name == "_" else name

    def inside(self, op: Op) -> Iterator[Value]:
        """The values that are written inside an operation."""
        for value in op.operands():
            if value in self.inline and value.made is not None:
                yield value
                yield from self.inside(value.made)

    # ------------------------------------------------------------------ lists

    def _over(self, op: Op) -> str:
        """A comprehension, or a loop where it writes."""
        lists: dict[Value, str] = {}
        text = op.write(lambda value: self._element(value, lists))[0]
        names, values = list(lists.values()), [self.text(value) for value in lists]
        if len(names) == 1:
            over = f"for {names[0]} in {values[0]}"
        else:
            over = f"for {', '.join(names)} in zip({', '.join(values)}, strict=True)"
        return f"{over}:\n{text}" if op.out is None else f"[{text} {over}]"

    def _element(self, value: Value, lists: dict[Value, str]) -> str:
        """What a comprehension calls the element of a list."""
        if value.kind != "list":
            return self.text(value)
        if value in self.inline and value.made is not None and value.made.each:
            return value.made.write(lambda v: self._element(v, lists))[0]
        if value not in lists:
            free = (x for x in ("x", "y", "z", "v", "w", "s") if x not in lists.values())
            wished = LETTERS.get(value.hint.rstrip("_0123456789"), "")
            lists[value] = wished if wished and wished not in lists.values() else next(free)
        return lists[value]

    def _all(self, value: Value) -> str:
        """The lists of all groups as one."""
        op = value.made
        if op is None or not op.repeats:
            letter = "k" if value.hint == "layer" else "x"
            return f"[{letter} for some in all_{value.name} for {letter} in some]"
        if op.context.flags is not None:
            return UNNAMED
        if op.takes == "layer":
            return "[k for group in groups for k in _layers(group)]"
        letter, part = LETTERS[op.takes], "0" if op.takes == "params" else "1"
        return f"[{letter} for group in groups for {letter} in _tensors(group)[{part}]]"


def by_key(value: Value) -> str:
    """A live value, by its key in the group."""
    assert value.live is not None
    key, index = value.live
    return f'group["{key}"]' if index is None else f'group["{key}"][{index}]'
