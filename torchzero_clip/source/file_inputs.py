"""Inputs: the lists that each loop over the groups begins with, where it needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from torchzero_clip.source.expressions import Expressions
from torchzero_clip.source.long_lines import Page
from torchzero_clip.source.symbols import ATOM, Context, Op, Value


class Inputs:
    """Parameters, gradients, state, layers and flags, each once in a loop.

    Args:
        ops: The operations that stand for them.
        page: Where their lines go.
        expressions: What the lines are made of.
        state: The contexts that have state.
        joint: Whether anything in the step is for all groups.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        page: Page,
        expressions: Expressions,
        state: Collection[Context],
        joint: bool,
    ) -> None:
        self.ops, self.page, self.expressions = list(ops), page, expressions
        self.names, self.state, self.joint = expressions.names, list(state), joint
        self.ready: set[Op | str] = set()  # what this loop has

    def below(self, op: Op) -> Iterator[Value]:
        """The lists of this kind that an operation needs."""
        for value in op.operands():
            if value.made is not None and value.made.repeats:
                yield value
            elif value in self.expressions.inline and value.made is not None:
                yield from self.below(value.made)

    def whole(self, takes: str, context: Context | None = None) -> Value:
        """The value of a kind of list, of all parameters or of those in a context."""
        context = context or Context()
        for op in self.ops:
            if op.takes == takes and op.context == context and op.out is not None:
                return op.out
        made = Value("list", hint=takes, context=context)
        made.made = Op(lambda n: ("", ATOM), [], made, repeats=True, takes=takes, context=context)
        self.ops.append(made.made)
        return made

    def tensors(self) -> None:
        """The parameters that have a gradient, and these."""
        if "tensors" not in self.ready:
            self.ready.add("tensors")
            params, grads = [self.names.of(self.whole(takes)) for takes in ("params", "grads")]
            self.page.line(f"{params}, {grads} = _tensors(group)")

    def bring(self, value: Value) -> None:
        """The line of a list, unless this loop has it; what is for all groups has none."""
        op = value.made
        assert op is not None
        if op in self.ready or self.names.phase % 2 == 0:
            return
        self.ready.add(op)
        if _is_whole(op) and op.takes in ("params", "grads"):
            if self.joint:
                self.tensors()
            return
        brings: dict[str, Callable[[Op, str], str]] = {"state": self._state, "flags": self._flags}
        name = self.names.of(value)
        text = brings.get(op.takes, self._part)(op, name)
        self.page.line(f"{name} = {text}")

    def _part(self, op: Op, name: str) -> str:
        """Parameters, gradients or layers: all of a group, or those with a flag."""
        if op.context.outer is None or op.context.flags is None:
            return "_layers(group)"
        whole = self.whole(op.takes, op.context.outer)
        self.bring(whole)
        self.bring(op.context.flags)
        return f"_chosen({whole.name}, {op.context.flags.name})"

    def _flags(self, op: Op, name: str) -> str:
        """Flags of all parameters of a group, then of those that each mask outside has left."""
        text, context, masks = op.write(self.expressions.text)[0], op.context, []
        while context.flags is not None and context.outer is not None:
            self.bring(context.flags)
            masks.append(context.flags)
            context = context.outer
        for flags in reversed(masks):
            self.page.line(f"{name} = {text}")
            text = f"_chosen({name}, {flags.name})"
        return text

    def _state(self, op: Op, name: str) -> str:
        """A list from the states of parameters, which one line gets."""
        params = self.whole("params", op.context)
        self.bring(params)
        number = self.state.index(op.context)
        held = f"state_{number + 1}" if number else "state"
        if held not in self.ready:
            self.ready.add(held)
            self.page.line(f"{held} = [self._{held}(p) for p in {params.name}]")
        return f'[s["{op.write(self.expressions.text)[0]}"] for s in {held}]'


def _is_whole(op: Op) -> bool:
    return op.context.flags is None
