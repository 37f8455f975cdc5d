"""The names of values in a file."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Iterator, Sequence

from torchzero_clip.source.schedule import uses
from torchzero_clip.source.symbols import Op, Value, numbered

TAKEN = {"group", "groups", "first", "loss", "closure", "self", "torch", "state", "key", "rows"}
TAKEN |= {"fnmatch", "math", "re", "Any", "Callable", "Iterable", "Tensor", "t_", *"ixyzvwspgk"}
TAKEN |= {"rows_", "rows__", *dir(builtins)}
"""Names that mean something else in a file."""


class ValueNames:
    """The names of values. They are the variable names of the rules.

    Several values can have the same name one after another.

    Args:
        ops: The operations of the step, in order.
        inline: The values that are inlined and have no name.
        crossing: The values that later loops over the groups read.
        taken: Other names that a value must not have.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        inline: Collection[Value],
        crossing: Collection[Value],
        taken: Collection[str] = (),
    ) -> None:
        self.taken = {*TAKEN, *taken}
        self.ops = ops
        self.inline = inline
        self.crossing = crossing
        self.readers = uses(ops)
        self.kinds: dict[str, str] = {}
        """The Python type of each name, such as "list" or "tuple"."""
        self.phase = 0
        """The phase of the line that is being written."""
        self.at = 0
        """The index of the operation that is being written."""
        self._last_value: dict[str, Value] = {}
        """For each name, the last value that had the name."""

    def of(self, value: Value, fresh: bool = False) -> str:
        """Return the name of a value. If `fresh` is true, no earlier value had this name."""
        if value.name:
            return value.name
        base = value.hint or ("n" if value.kind == "tensor" else "xs")
        if value.op is not None and value.op.takes == "state" and base == "state":
            base = "kept"
        kind = value.elements if value.kind == "list" else value.kind
        each = value.op is not None and value.op.each
        used = self._last_value if fresh else {}
        names = (x for x in numbered(base) if x not in used and self._free(x, kind, each))
        name = next(names)
        value.name = name
        self._last_value[name] = value
        self.kinds.setdefault(name, kind)
        return name

    def spare(self, base: str) -> str:
        """Return an unused name for a number that only the next line reads."""
        return base if base not in self._last_value else self.spare(f"{base}_")

    def _free(self, name: str, kind: str, each: bool) -> bool:
        """Return whether a new value can have a name, because no later line reads the old value."""
        if name in self.taken:
            return False
        last = self._last_value.get(name)
        if last is None:
            return True
        adapts = each and self.kinds[name] == "tuple" and kind == "list"
        if self.kinds[name] != kind and not adapts:
            return False
        if last in self.crossing or last.op is None or last.op.takes:
            return False
        if last.op.phase != self.phase:  # another round of this loop may read it
            return max([op.phase for op in self._users(last)], default=0) < self.phase
        users = [self.ops.index(op) for op in self._users(last)]
        return max(users, default=-1) <= self.at

    def _users(self, value: Value) -> Iterator[Op]:
        """Yield the statements that read a value."""
        for op in self.readers.get(value, []):
            if op.out in self.inline:
                assert op.out is not None
                yield from self._users(op.out)
            else:
                yield op
