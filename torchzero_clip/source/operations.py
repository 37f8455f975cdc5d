"""The recorded operations of a step, and the values that tensors and numbers represent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from torchzero_clip.source.functions import Functions
from torchzero_clip.source.helpers import Helpers
from torchzero_clip.source.live_numbers import LiveNumbers
from torchzero_clip.source.symbols import Context, Kind, Op, Value, Write, operand
from torchzero_clip.source.written_numbers import WrittenNumber


class Operations:
    """The recorded operations of a step, and the values that they read and compute."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.known: dict[int, tuple[Any, Value]] = {}
        """Each tensor that represents a value, together with the value, by the id of the tensor."""
        self.context = Context()
        self.link = ""
        self.paused = False
        self.joins = False
        """Whether an elementwise rule, such as a percentile, reads the elements of all groups."""
        self.helpers = Helpers()
        self.live = LiveNumbers()
        self.functions = Functions(self.helpers)
        self.layers: dict[Context, Value] = {}
        self.like: Value | None = None
        """The value on whose device a rule creates constants."""
        self.flowing: Value | None = None
        """The update as the current link receives it."""

    def knows(self, x: Any) -> Value | None:
        """Return the value that a tensor or a number represents, or None."""
        if isinstance(x, WrittenNumber):
            return x.value
        known = self.known.get(id(x)) if isinstance(x, Tensor) else None
        return None if known is None else known[1]

    def learn(self, tensor: Tensor, value: Value) -> Tensor:
        """Record that a tensor represents a value, and return the tensor."""
        self.known[id(tensor)] = tensor, value
        return tensor

    def add(
        self,
        write: Write,
        args: Sequence[Value],
        out: Value | None = None,
        **kinds: Any,
    ) -> None:
        """Record an operation.

        Args:
            write: The function that writes the operation.
            args: The values that it reads.
            out: The value that it computes, if any.
            **kinds: Other attributes of `Op`. By default an operation is joint if all its
                arguments are, and a constant is joint outside of masks.
        """
        if "joint" in kinds:
            joint = kinds.pop("joint")
        elif args:
            joint = all(value.joint for value in args)
        else:
            joint = self.context.flags is None
        op = Op(write, list(args), out, joint=joint, context=self.context, link=self.link, **kinds)
        if out is not None:
            out.op = op
            out.joint = joint
            out.context = self.context
        self.ops.append(op)

    def new(
        self,
        kind: Kind | Literal["tuple"],
        write: Write,
        args: Sequence[Value],
        hint: str = "",
        **kinds: Any,
    ) -> Value:
        """Record an operation, and return the new value that the operation computes.

        Args:
            kind: The kind of the value; "tuple" is a list that is a tuple in Python.
            write: The function that writes the operation.
            args: The values that it reads.
            hint: The name of the value in the rule.
            **kinds: Other attributes of `Op`, as for `add`.
        """
        value = Value("list" if kind == "tuple" else kind, hint=hint)
        if kind == "tuple":
            value.elements = "tuple"
        self.add(write, args, value, **kinds)
        return value

    def input(self, takes: str, hint: str, text: str = "") -> Value:
        """Record a list that every loop can read, and return the list.

        Args:
            takes: The kind of input: see `Op`.
            hint: The name of the list in the rule.
            text: The expression that computes the list, if it needs one.
        """
        return self.new("list", lambda names: text, [], hint, joint=False, takes=takes)

    def gathered(self, value: Value) -> Value:
        """Return one list that joins the lists of all groups.

        Lists of state and lists inside a mask have no name after their loop, so the loop first
        makes a named list of their tensors.
        """
        of_state = value.op is not None and value.op.takes == "state"
        if self.context.flags is not None or of_state:
            return self._gathered(self._listed(value))
        return self._gathered(value)

    def _gathered(self, value: Value) -> Value:
        """Return one list that joins the lists of all groups. These lists must have names."""
        write = lambda names: names(value)
        return self.new("list", write, [value], value.hint, joint=True, gathers=True)

    def _listed(self, value: Value) -> Value:
        """Return a new list of the same tensors, which has its own name."""
        write = lambda names: f"list({names(value)})"
        always = value.op is None or bool(value.op.takes) or value.op.always
        listed = self.new("list", write, [value], value.hint, always=always, stays=True)
        listed.root = value
        return listed

    def named(self, number: WrittenNumber, name: str) -> Value:
        """Record a line that assigns a hyperparameter to a name, and return the value."""
        write = lambda names: operand(number.value, names)
        return self.new("tensor", write, [number.value], name, stays=True)

    def layer(self) -> Value:
        """Return the layers of the parameters in the current context."""
        if self.context not in self.layers:
            self.layers[self.context] = self.input("layer", "layer")
        return self.layers[self.context]

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        """Return a context in which torch calls are not recorded."""
        before = self.paused
        self.paused = True
        try:
            yield
        finally:
            self.paused = before

    def size(self, value: Value, count: int) -> Any:
        """Return the number of elements of each tensor in a list."""
        write = lambda names: f"{names(value)}.numel()"
        return self.live.number(count, Value("sizes"), write, (value,))

    @property
    def update(self) -> Value:
        """The update as the current link receives it."""
        assert self.flowing is not None, "a rule is asked when an update has come to it"
        return self.flowing

    def dtype(self) -> Value:
        """Return the dtype of the update."""
        u = self.update
        return self.new("tensor", lambda names: f"{names(u)}[0].dtype", [u])

    def record(
        self,
        kind: Kind | Literal["tuple"],
        out: Tensor,
        write: Write,
        args: Sequence[Value],
        hint: str = "",
        **kinds: Any,
    ) -> Tensor:
        """Record an operation. A tensor represents its result, and is returned.

        The arguments are those of `new`, and the tensor `out`.
        """
        return self.learn(out, self.new(kind, write, args, hint, **kinds))
