"""The operations of a step as Python statements, in loops over the groups."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence

from torchzero_clip.source import schedule
from torchzero_clip.source.expressions import Expressions
from torchzero_clip.source.file_inputs import Inputs
from torchzero_clip.source.long_lines import INDENT, WIDTH, Page, exploded
from torchzero_clip.source.symbols import Context, Op, SourceError, Value, operand
from torchzero_clip.source.value_names import ValueNames


class Lines:
    """The lines of the method `step`.

    Args:
        ops: The operations, in the order in which the chain recorded them.
        about: For the path of each link, the comment above the lines of the link.
        state: The contexts that have state.
        tuples: For the key of each hyperparameter that is a tuple, names for its elements.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        about: dict[str, list[str]],
        state: Collection[Context],
        tuples: dict[str, list[str]],
    ) -> None:
        self.about = about
        self.tuples = tuples
        ops = schedule.needed(ops)
        schedule.phases(ops)
        ops = schedule.with_step_size(schedule.rebound(ops, set(schedule.crossing(ops))))
        schedule.phases(ops)
        self.ops = sorted([op for op in ops if not op.takes], key=lambda op: op.phase)
        self.inline = schedule.inlined(self.ops)
        self.crossing = list(schedule.crossing(self.ops))
        self.joint = any(op.joint for op in self.ops)
        """Whether some operations of the step run once for all groups."""
        taken = [name for names in tuples.values() for name in names]
        self.page = Page()
        self.names = ValueNames(self.ops, self.inline, self.crossing, taken)
        self.expressions = Expressions(self.names, self.inline)
        inputs = [op for op in ops if op.takes]
        self.inputs = Inputs(inputs, self.page, self.expressions, state, self.joint)
        self._commented = ""
        """The path of the link whose comment is the latest in the file so far."""

    def write(self) -> list[str]:
        """Return the lines of the method `step`."""
        for phase in sorted({op.phase for op in self.ops}):
            statements = [op for op in self.ops if op.phase == phase and op.out not in self.inline]
            if statements:
                self.names.phase = phase
                self.inputs.ready = set()
                self.expressions.unpacked = {}
                self.page.indent = 2
                if not statements[0].joint:
                    self._head(statements)
                self._body(statements)
        return self.page.lines

    # ------------------------------------------------------------------ loops and conditions

    def _head(self, ops: Sequence[Op]) -> None:
        """Write the first line of a loop over the groups, with the values of earlier loops."""
        earlier = list(self._from_earlier_loops(ops))
        for value in [op.out for op in ops if op.out in self.crossing and op.out is not None]:
            self.names.of(value, fresh=_mask(value.op) is not None)
            self.page.line(f"all_{value.name}: list[Any] = []")
        names = ", ".join(["group", *[value.name for value in earlier]])
        lists = ", ".join(["groups", *[f"all_{value.name}" for value in earlier]])
        loop = f"for {names} in zip({lists}, strict=True):"
        if not earlier:
            loop = f"for group in {'groups' if self.joint else 'self.param_groups'}:"
        is_long = not self.page.fits(loop)
        self.page.line("for i, group in enumerate(groups):" if is_long else loop)
        self.page.indent = 3
        if is_long:
            for value in earlier:
                self.page.line(f"{value.name} = all_{value.name}[i]")
        if not self.joint:
            self.inputs.tensors()
            self.page.line(f"if not {self.inputs.whole('params').name}:\n{INDENT}continue")

    def _from_earlier_loops(self, ops: Sequence[Op]) -> Iterator[Value]:
        """Yield the values of earlier loops that this loop reads."""
        phase = self.names.phase
        in_loop = {op for op in self.ops if op.phase == phase and not op.joint} | set(ops)
        for value in self.crossing:
            earlier = value.op is not None and value.op.phase < phase
            if earlier and not in_loop.isdisjoint(self.names.readers.get(value, [])):
                yield value

    def _body(self, ops: Sequence[Op]) -> None:
        """Write the statements of a loop, in blocks of statements with the same mask."""
        for _, block in itertools.groupby(ops, _mask):
            self._block(list(block))

    def _block(self, ops: Sequence[Op]) -> None:
        """Write the statements of one mask, under an `if` that tests for selected parameters."""
        mask = _mask(ops[0])
        if mask is None:
            for op in ops:
                self._op(op)
            return
        for op in ops:
            self._comment(op)
            for value in self.inputs.below(op):
                self.inputs.bring(value)
        passed_on = [op.out for op in ops if op.out in self.crossing and op.out is not None]
        for value in passed_on:
            self.page.line(f"{value.name}: Any = []")
        self.page.line(f"if any({self._flags(mask, ops[0])}):")
        before = set(self.inputs.ready)
        self.page.indent += 1
        for op in ops:
            self._op(op)
        self.page.indent -= 1
        self.inputs.ready = before
        for value in passed_on:
            self.page.line(f"all_{value.name}.append({value.name})")

    def _flags(self, mask: Context, op: Op) -> str:
        """Return the name of a list that has a true element if the mask selects any parameter."""
        assert mask.flags is not None
        if not op.joint:
            self.inputs.bring(mask.flags)
            return mask.flags.name
        lists = [v for v in self.crossing if v.kind == "list" and v.context == mask]
        names = [v.name for v in lists if v.name]
        if not names:
            raise SourceError(
                f"to_source: {op.link} cannot be exported as plain PyTorch code inside a transform "
                "that selects parameters"
            )
        return f"all_{names[0]}"

    # ------------------------------------------------------------------ statements

    def _op(self, op: Op) -> None:
        """Write the lines that read the inputs of an operation, then the operation's statement."""
        self._comment(op)
        for other in self._of_same_link(op):
            for value in self.inputs.below(other):
                self.inputs.bring(value)
        self._unpack(op)
        self.names.at = self.ops.index(op)
        while not self.page.fits(text := self.expressions.statement(op)):
            largest = self._largest(op)
            if largest is None:
                text = self._number_apart(op) or self._zipped(text)
                text = text if "\n" in text or self.page.fits(text) else exploded(text)
                break
            self.inline.discard(largest)
            assert largest.op is not None
            self._op(largest.op)
        if op.each and op.out is None:
            self.page.loop(*text.split("\n"))
        else:
            self.page.line(text)
        if op.out is not None and op.out in self.crossing and _mask(op) is None:
            self.page.line(f"all_{op.out.name}.append({op.out.name})")

    def _of_same_link(self, op: Op) -> list[Op]:
        """Return the operations of the same link in this loop, whose inputs are read together."""
        alike = (op.phase, op.link, op.context)
        return [other for other in self.ops if (other.phase, other.link, other.context) == alike]

    def _comment(self, op: Op) -> None:
        """Write the comment of a link before its first statement."""
        if op.link and op.link != self._commented:
            self._commented = op.link
            self.page.comment(self.about[op.link])

    def _unpack(self, op: Op) -> None:
        """Write the lines that unpack tuple hyperparameters, if a rule names their elements."""
        for leaf in self._live_in(op):
            assert leaf.live is not None
            key, index = leaf.live
            unpacked = self.expressions.unpacked
            names = None if index is None or key in unpacked or op.joint else self.tuples.get(key)
            if names is None:
                continue
            reused = set(names) - {"_"}
            valid = {k: others for k, others in unpacked.items() if reused.isdisjoint(others)}
            self.expressions.unpacked = {**valid, key: names}
            self.page.line(f'{", ".join(names)} = group["{key}"]')

    def _live_in(self, op: Op) -> Iterator[Value]:
        """Yield the hyperparameters in the statement of an operation."""
        for value in op.args:
            if value.live is not None:
                yield value
            elif (value.numeric or value in self.inline) and value.op is not None:
                yield from self._live_in(value.op)

    # ------------------------------------------------------------------ lines that are too long

    def _largest(self, op: Op) -> Value | None:
        """Return the inlined value that should get its own line, or None if there is none.

        This is the value with the shortest text that shortens the statement enough. If no value
        does, it is the value with the longest text.
        """
        sizes = {v: len(self.expressions.text(v)) for v in self.expressions.inside(op)}
        inner = sorted(sizes, key=lambda v: sizes[v])
        over = len(self.expressions.statement(op)) - WIDTH + len(INDENT) * self.page.indent
        return next((v for v in inner if sizes[v] - 6 > over), inner[-1] if inner else None)

    def _number_apart(self, op: Op) -> str | None:
        """Name the longest expression of numbers on a line of its own, and return the statement."""
        text = self.expressions.text
        numbers = [v for v in op.args if v.kind == "number" and v.live is None]
        if not numbers:
            return None
        longest = max(numbers, key=lambda v: len(operand(v, text)))
        name = self.names.spare(longest.hint or "factor")
        line = f"{name} = {operand(longest, text)}"
        if not self.page.fits(line):
            line = f"{name} = {self._leaves_apart(longest)}"
        self.page.line(line)
        longest.name = name
        statement = self.expressions.statement(op)
        longest.name = ""
        return statement

    def _leaves_apart(self, number: Value) -> str:
        """Write lines that name the hyperparameters of an expression, and return the expression."""
        names: dict[tuple[str, int | None], str] = {}

        def named(value: Value) -> str:
            assert value.live is not None
            if value.live not in names:
                names[value.live] = self.names.spare(value.live[0].rpartition("/")[2])
                self.page.line(f"{names[value.live]} = {self.expressions.live(value)}")
            return names[value.live]

        return operand(number, named)

    def _zipped(self, text: str) -> str:
        """Write a line that zips the lists of a comprehension, and return the comprehension."""
        match = re.search(r" for ([\w, ]+) in (zip\(.*, strict=True\))[\])]$", text)
        if match is None:
            return text
        # tuples of another length are another type, so they need another name
        name = "rows" + "_" * (match[1].count(",") - 1)
        self.page.line(f"{name} = {match[2]}")
        return text[: match.start(2)] + name + text[match.end(2) :]


def _mask(op: Op | None) -> Context | None:
    """Return the mask that must select a parameter, or else the operation is skipped, or None."""
    if op is None or op.always or op.context.flags is None:
        return None
    return op.context
