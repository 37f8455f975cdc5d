"""The lists that a loop over the groups reads from a group, such as parameters and state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torchzero_clip.source.expressions import Expressions
from torchzero_clip.source.long_lines import Page
from torchzero_clip.source.symbols import Context, Op, Value


class Inputs:
    """Writes the lists of parameters, gradients, state, layers and flags, once for each loop.

    Args:
        ops: The operations that read these lists.
        page: The page that receives the lines.
        expressions: Writes operations as expressions.
        state: The contexts that have state.
        joint: Whether some operations of the step run once for all groups.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        page: Page,
        expressions: Expressions,
        state: Collection[Context],
        joint: bool,
    ) -> None:
        self.ops = list(ops)
        self.page = page
        self.expressions = expressions
        self.names = expressions.names
        self.state = list(state)
        self.joint = joint
        self.ready: set[Op | str] = set()
        """The lists that the current loop has already written."""

    def below(self, op: Op) -> Iterator[Value]:
        """Yield the inputs that an operation needs, including operations that are inlined in it."""
        for value in op.operands():
            if value.op is not None and value.op.takes:
                yield value
            elif value in self.expressions.inline and value.op is not None:
                yield from self.below(value.op)

    def whole(self, takes: str, context: Context | None = None) -> Value:
        """Return one kind of input, for all parameters or for the parameters of a context."""
        context = context or Context()
        for op in self.ops:
            if op.takes == takes and op.context == context and op.out is not None:
                return op.out
        value = Value("list", hint=takes, context=context)
        value.op = Op(lambda n: "", [], value, takes=takes, context=context)
        self.ops.append(value.op)
        return value

    def tensors(self) -> None:
        """Write the line that reads parameters and gradients, unless this loop has the line."""
        if "tensors" not in self.ready:
            self.ready.add("tensors")
            params, grads = [self.names.of(self.whole(takes)) for takes in ("params", "grads")]
            self.page.line(f"{params}, {grads} = _tensors(group)")

    def bring(self, value: Value) -> None:
        """Write the line that reads an input, if the current loop needs the line and lacks it."""
        op = value.op
        assert op is not None
        if op in self.ready or self.names.phase % 2 == 0:
            return
        self.ready.add(op)
        if op.context.flags is None and op.takes in ("params", "grads"):
            if self.joint:
                self.tensors()
            return
        name = self.names.of(value)
        if op.takes == "state":
            text = self._state(op)
        elif op.takes == "flags":
            text = self._flags(op, name)
        else:
            text = self._part(op)
        self.page.line(f"{name} = {text}")

    def _part(self, op: Op) -> str:
        """Return the text that reads the layers, or selects the elements of a list with a mask."""
        if op.context.outer is None or op.context.flags is None:
            return "_layers(group)"
        whole = self.whole(op.takes, op.context.outer)
        self.bring(whole)
        self.bring(op.context.flags)
        return f"_chosen({whole.name}, {op.context.flags.name})"

    def _flags(self, op: Op, name: str) -> str:
        """Return the text that computes the flags of a mask, inside the masks around it."""
        text = op.write(self.expressions.text)
        context = op.context
        masks: list[Value] = []
        while context.flags is not None and context.outer is not None:
            self.bring(context.flags)
            masks.append(context.flags)
            context = context.outer
        for flags in reversed(masks):
            self.page.line(f"{name} = {text}")
            text = f"_chosen({name}, {flags.name})"
        return text

    def _state(self, op: Op) -> str:
        """Return the text of a list of state tensors. First write the line that reads all state."""
        params = self.whole("params", op.context)
        self.bring(params)
        number = self.state.index(op.context)
        states = f"state_{number + 1}" if number else "state"
        if states not in self.ready:
            self.ready.add(states)
            self.page.line(f"{states} = [self._{states}(p) for p in {params.name}]")
        return f'[s["{op.write(self.expressions.text)}"] for s in {states}]'
