"""Naming: what each value is called in a file."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Iterator, Sequence

from torchzero_clip.source.schedule import uses
from torchzero_clip.source.symbols import Op, Value

TAKEN = {"group", "groups", "first", "loss", "closure", "self", "torch", "state", "key", "rows"}
TAKEN |= {"math", "re", "Any", "Callable", "Iterable", "Tensor", "t_", *"ixyzvwspgk"}
TAKEN |= {"rows_", "rows__", *dir(builtins)}


class Naming:
    """The names of values: those that the rules give them, once no line needs an older value.

    Args:
        ops: The operations of the step, in order.
        inline: The values that are written where they are used, and have no name.
        crossing: The values that later loops over the groups read.
        taken: Names that stand for other things.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        inline: Collection[Value],
        crossing: Collection[Value],
        taken: Collection[str] = (),
    ) -> None:
        self.taken = {*TAKEN, *taken}
        self.ops, self.inline, self.crossing = ops, inline, crossing
        self.readers = uses(ops)
        self.kinds: dict[str, str] = {}  # what Python has for each name
        self.phase, self.at = 0, 0  # where the line stands that is written now
        self._held: dict[str, Value] = {}

    def of(self, value: Value, fresh: bool = False) -> str:
        """The name of a value; a fresh one is of no value before."""
        if value.name:
            return value.name
        base = value.hint or {"list": "xs", "tensor": "n"}.get(value.kind, "xs")
        if value.made is not None and value.made.takes == "state" and base == "state":
            base = "kept"
        kind = value.elements if value.kind == "list" else value.kind
        each = value.made is not None and value.made.each
        name, count = base, 1
        while not self._free(name, kind, each) or (fresh and name in self._held):
            count += 1
            name = f"{base}_{count}"
        value.name, self._held[name] = name, value
        self.kinds.setdefault(name, kind)
        return name

    def spare(self, base: str) -> str:
        """A name for a number, which the next line alone reads."""
        return base if base not in self._held else self.spare(f"{base}_")

    def _free(self, name: str, kind: str, each: bool) -> bool:
        if name in self.taken:
            return False
        held = self._held.get(name)
        if held is None:
            return True
        adapts = each and self.kinds[name] == "tuple" and kind == "list"
        if self.kinds[name] != kind and not adapts:
            return False
        if held in self.crossing or held.made is None or held.made.repeats:
            return False
        if held.made.phase != self.phase:  # it may be read in another round of this loop
            return max([op.phase for op in self._users(held)], default=0) < self.phase
        users = [self.ops.index(op) for op in self._users(held)]
        return max(users, default=-1) <= self.at

    def _users(self, value: Value) -> Iterator[Op]:
        """The statements that read a value."""
        for op in self.readers.get(value, []):
            if op.out in self.inline:
                assert op.out is not None
                yield from self._users(op.out)
            else:
                yield op
