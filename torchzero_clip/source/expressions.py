"""Operations as Python expressions.

A value that only one operation reads is inlined: its expression is written inside the expression of
that operation, and it gets no variable.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchzero_clip.source.symbols import Op, Value
from torchzero_clip.source.value_names import ValueNames

LETTERS = {"params": "p", "grads": "g", "layer": "k"}
"""For some lists, the name of an element in a comprehension."""


class Expressions:
    """The text of operations and values.

    Args:
        names: The names of values.
        inline: The values that are inlined.
    """

    def __init__(self, names: ValueNames, inline: set[Value]) -> None:
        self.names = names
        self.inline = inline
        self.unpacked: dict[str, list[str]] = {}
        """For each hyperparameter that is a tuple, names for its elements, by key."""

    def statement(self, op: Op) -> str:
        """Return the statement that assigns the result of an operation to a name."""
        text = self.of(op)
        if op.out is None:
            return text
        name = self.names.of(op.out)
        if op.out.kind == "list" and self.names.kinds[name] != op.out.elements:
            text = f"tuple({text[1:-1]})"  # the name was a tuple before, and type checkers object
        return f"{name} = {text}"

    def of(self, op: Op) -> str:
        """Return the expression of an operation, or a loop: the first line and the line inside."""
        if op.gathers:
            return self._joined(op.args[0])
        return self._over(op) if op.each else op.write(self.text)

    def text(self, value: Value) -> str:
        """Return the text of a value: the name, or the expression of an inlined value."""
        if value.live is not None:
            return self.live(value)
        if value in self.inline and value.op is not None:
            return self.of(value.op)
        return self.names.of(value)

    def live(self, value: Value) -> str:
        """Return the text of a hyperparameter: its name in the step, or its lookup by key."""
        assert value.live is not None
        key, index = value.live
        names = self.unpacked.get(key)
        name = "_" if index is None or names is None else names[index]
        return by_key(value) if name == "_" else name

    def inside(self, op: Op) -> Iterator[Value]:
        """Yield the values that are inlined in an operation."""
        for value in op.operands():
            if value in self.inline and value.op is not None:
                yield value
                yield from self.inside(value.op)

    # ------------------------------------------------------------------ lists

    def _over(self, op: Op) -> str:
        """Return a comprehension over the parameters, or a loop if the operation has no result."""
        lists: dict[Value, str] = {}
        text = op.write(lambda value: self._element(value, lists))
        names = list(lists.values())
        values = [self.text(value) for value in lists]
        if len(names) == 1:
            head = f"for {names[0]} in {values[0]}"
        else:
            head = f"for {', '.join(names)} in zip({', '.join(values)}, strict=True)"
        return f"{head}:\n{text}" if op.out is None else f"[{text} {head}]"

    def _element(self, value: Value, lists: dict[Value, str]) -> str:
        """Return the text of one element of a list in a comprehension.

        Args:
            value: The list, or a value that is the same for all elements.
            lists: The names of elements, by list. The method adds new lists.
        """
        if value.kind != "list":
            return self.text(value)
        if value in self.inline and value.op is not None and value.op.each:
            return value.op.write(lambda v: self._element(v, lists))
        if value not in lists:
            free = (x for x in ("x", "y", "z", "v", "w", "s") if x not in lists.values())
            preferred = LETTERS.get(value.hint.rstrip("_0123456789"), "")
            if preferred and preferred not in lists.values():
                lists[value] = preferred
            else:
                lists[value] = next(free)
        return lists[value]

    def _joined(self, value: Value) -> str:
        """Return the expression that joins the lists of all groups."""
        op = value.op
        if op is None or not op.takes:
            letter = "k" if value.hint == "layer" else "x"
            return f"[{letter} for some in all_{value.name} for {letter} in some]"
        if op.takes == "layer":
            return "[k for group in groups for k in _layers(group)]"
        letter = LETTERS[op.takes]
        index = 0 if op.takes == "params" else 1
        return f"[{letter} for group in groups for {letter} in _tensors(group)[{index}]]"


def by_key(value: Value) -> str:
    """Return the text that reads a hyperparameter from the group by its key."""
    assert value.live is not None
    key, index = value.live
    return f'group["{key}"]' if index is None else f'group["{key}"][{index}]'
