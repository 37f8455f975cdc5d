"""Lines: the operations of a step as statements of Python, in loops over the groups."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from torchzero_clip.source import schedule
from torchzero_clip.source.expressions import UNNAMED, Expressions
from torchzero_clip.source.file_inputs import Inputs
from torchzero_clip.source.long_lines import INDENT, WIDTH, Page, exploded
from torchzero_clip.source.symbols import Context, Op, SourceError, Value, operand
from torchzero_clip.source.value_names import Naming


class Lines:
    """The body of `step`.

    Args:
        ops: The operations, in the order in which the chain asked for them.
        about: The comment above the lines of a link, by its path.
        state: The contexts that have state.
        tuples: Names for the parts of live values that are tuples, by key.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        about: dict[str, list[str]],
        state: Collection[Context],
        tuples: dict[str, list[str]],
    ) -> None:
        self.about, self.tuples = about, tuples
        ops = schedule.needed(ops)
        schedule.phases(ops)
        ops = schedule.stepped(schedule.rebound(ops, set(schedule.crossing(ops))))
        schedule.phases(ops)
        self.ops = sorted([op for op in ops if not op.repeats], key=lambda op: op.phase)
        self.inline = schedule.inlined(self.ops)
        self.crossing = list(schedule.crossing(self.ops))
        self.joint = any(op.joint for op in self.ops)  # whether anything is for all groups
        taken = [name for row in tuples.values() for name in row]
        self.page = Page()
        self.names = Naming(self.ops, self.inline, self.crossing, taken)
        self.expressions = Expressions(self.names, self.inline)
        inputs = [op for op in ops if op.repeats]
        self.inputs = Inputs(inputs, self.page, self.expressions, state, self.joint)
        self._linked = ""  # the link whose comment stands above

    def write(self) -> list[str]:
        """The lines."""
        for phase in sorted({op.phase for op in self.ops}):
            some = [op for op in self.ops if op.phase == phase and op.out not in self.inline]
            if some:
                self.names.phase, self.inputs.ready = phase, set()
                self.expressions.unpacked, self.page.indent = {}, 2
                if not some[0].joint:
                    self._head(some)
                self._body(some)
        return self.page.lines

    # ------------------------------------------------------------------ loops and conditions

    def _head(self, ops: Sequence[Op]) -> None:
        """The head of a loop over the groups, with what it takes from loops before."""
        taken = list(self._taken(ops))
        for value in [op.out for op in ops if op.out in self.crossing and op.out is not None]:
            self.names.of(value, fresh=_guard(value.made) is not None)
            self.page.line(f"all_{value.name}: list[Any] = []")
        names = ", ".join(["group", *[value.name for value in taken]])
        lists = ", ".join(["groups", *[f"all_{value.name}" for value in taken]])
        loop = f"for {names} in zip({lists}, strict=True):"
        if not taken:
            self.page.line(f"for group in {'groups' if self.joint else 'self.param_groups'}:")
            self.page.indent = 3
        elif self.page.fits(loop):
            self.page.line(loop)
            self.page.indent = 3
        else:
            self.page.line("for i, group in enumerate(groups):")
            self.page.indent = 3
            for value in taken:
                self.page.line(f"{value.name} = all_{value.name}[i]")
        if not self.joint:
            self.inputs.tensors()
            self.page.line(f"if not {self.inputs.whole('params').name}:\n{INDENT}continue")

    def _taken(self, ops: Sequence[Op]) -> Iterator[Value]:
        """The values of loops before that this one reads."""
        phase = self.names.phase
        here = {op for op in self.ops if op.phase == phase and not op.joint} | set(ops)
        for value in self.crossing:
            earlier = value.made is not None and value.made.phase < phase
            if earlier and not here.isdisjoint(self.names.readers.get(value, [])):
                yield value

    def _body(self, ops: Sequence[Op]) -> None:
        """The lines of a loop, those of a mask under the condition that it has parameters."""
        block: list[Op] = []
        for op in [*ops, None]:
            if block and (op is None or _guard(op) != _guard(block[0])):
                self._block(block)
                block = []
            if op is not None:
                block.append(op)

    def _block(self, ops: Sequence[Op]) -> None:
        guard = _guard(ops[0])
        if guard is None:
            for op in ops:
                self._op(op)
            return
        for op in ops:
            self._comment(op)
            for value in self.inputs.below(op):
                self.inputs.bring(value)
        late = [op.out for op in ops if op.out in self.crossing and op.out is not None]
        for value in late:
            self.page.line(f"{value.name}: Any = []")
        self.page.line(f"if any({self._flags(guard, ops[0])}):")
        before = set(self.inputs.ready)
        self.page.indent += 1
        for op in ops:
            self._op(op)
        self.page.indent -= 1
        self.inputs.ready = before
        for value in late:
            self.page.line(f"all_{value.name}.append({value.name})")

    def _flags(self, guard: Context, op: Op) -> str:
        """What is true where the parameters of a context are there: in a group, or in all."""
        assert guard.flags is not None
        if not op.joint:
            self.inputs.bring(guard.flags)
            return guard.flags.name
        lists = [v for v in self.crossing if v.kind == "list" and v.context == guard]
        names = [v.name for v in lists if v.name]
        if not names:
            raise SourceError(f"{op.link} cannot be written inside a mask; use the library for it")
        return f"all_{names[0]}"

    # ------------------------------------------------------------------ statements

    def _op(self, op: Op) -> None:
        self._comment(op)
        for other in self._together(op):
            for value in self.inputs.below(other):
                self.inputs.bring(value)
        self._unpack(op)
        self.names.at = self.ops.index(op)
        while not self.page.fits(text := self.expressions.statement(op)) or UNNAMED in text:
            largest = self._largest(op)
            if largest is None:
                text = self._number_apart(op) or self._zipped(text)
                text = text if "\n" in text or self.page.fits(text) else exploded(text)
                break
            self.inline.discard(largest)
            assert largest.made is not None
            self._op(largest.made)
        if op.each and op.out is None:
            self.page.loop(*text.split("\n"))
        else:
            self.page.line(text)
        if op.out is not None and op.out in self.crossing and _guard(op) is None:
            self.page.line(f"all_{op.out.name}.append({op.out.name})")

    def _together(self, op: Op) -> list[Op]:
        """The operations of its link in this loop, before which its lists stand."""
        alike = (op.phase, op.link, op.context)
        return [other for other in self.ops if (other.phase, other.link, other.context) == alike]

    def _comment(self, op: Op) -> None:
        if op.link and op.link != self._linked:
            self._linked = op.link
            self.page.comment(self.about[op.link])

    def _unpack(self, op: Op) -> None:
        """A tuple of live values gets names, where a rule names them."""
        for leaf in self._live_in(op):
            assert leaf.live is not None
            key, index = leaf.live
            unpacked = self.expressions.unpacked
            names = None if index is None or key in unpacked or op.joint else self.tuples.get(key)
            if names is None:
                continue
            taken = set(names) - {"_"}
            old = {k: row for k, row in unpacked.items() if taken.isdisjoint(row)}
            self.expressions.unpacked = {**old, key: names}
            self.page.line(f'{", ".join(names)} = group["{key}"]')

    def _live_in(self, op: Op) -> Iterator[Value]:
        for value in op.args:
            if value.live is not None:
                yield value
            elif (value.numeric or value in self.inline) and value.made is not None:
                yield from self._live_in(value.made)

    # ------------------------------------------------------------------ what is too long

    def _largest(self, op: Op) -> Value | None:
        """The expression inside an operation that becomes a line: the shortest that does."""
        sizes = {v: len(self.expressions.text(v)) for v in self.expressions.inside(op)}
        inner = sorted(sizes, key=lambda v: sizes[v])
        over = len(self.expressions.statement(op)) - WIDTH + len(INDENT) * self.page.indent
        return next((v for v in inner if sizes[v] - 6 > over), inner[-1] if inner else None)

    def _number_apart(self, op: Op) -> str | None:
        """The statement with a name for the longest expression of numbers in it."""
        text = self.expressions.text
        some = [v for v in op.args if v.kind == "number" and v.live is None]
        if not some:
            return None
        longest = max(some, key=lambda v: len(operand(v, text)[0]))
        name = self.names.spare(longest.hint or "factor")
        line = f"{name} = {operand(longest, text)[0]}"
        if not self.page.fits(line):
            line = f"{name} = {self._leaves_apart(longest)}"
        self.page.line(line)
        longest.name = name
        found = self.expressions.statement(op)
        longest.name = ""
        return found

    def _leaves_apart(self, number: Value) -> str:
        """An expression of live values, which get names before it."""
        names: dict[tuple[str, int | None], str] = {}

        def named(value: Value) -> str:
            assert value.live is not None
            if value.live not in names:
                names[value.live] = self.names.spare(value.live[0].rpartition("/")[2])
                self.page.line(f"{names[value.live]} = {self.expressions.live(value)}")
            return names[value.live]

        return operand(number, named)[0]

    def _zipped(self, text: str) -> str:
        """A comprehension whose lists come from a line before it."""
        found = re.search(r" for ([\w, ]+) in (zip\(.*, strict=True\))[\])]$", text)
        if found is None:
            return text
        name = "rows" + "_" * (found[1].count(",") - 1)  # those of three are of another type
        self.page.line(f"{name} = {found[2]}")
        return text[: found.start(2)] + name + text[found.end(2) :]


def _guard(op: Op | None) -> Context | None:
    """The context whose parameters must be there for an operation to run."""
    return op.context if op is not None and op.context.flags is not None and not op.always else None
