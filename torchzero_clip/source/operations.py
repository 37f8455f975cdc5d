"""The recorded operations of a step, and the values that tensors and numbers represent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from torchzero_clip.source.functions import Functions
from torchzero_clip.source.helpers import Helpers
from torchzero_clip.source.live_numbers import LiveNumbers
from torchzero_clip.source.symbols import ATOM, Context, Kind, Op, Value, Write, operand
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
    ) -> Value | None:
        """Record an operation, and return the value that the operation computes.

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
        return out

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
        every = Value("list", hint=value.hint)
        write = lambda names: (names(value), ATOM)
        self.add(write, [value], every, joint=True, gathers=True, small=True)
        return every

    def _listed(self, value: Value) -> Value:
        """Return a new list of the same tensors, which has its own name."""
        listed = Value("list", hint=value.hint, root=value)
        write = lambda names: (f"list({names(value)})", ATOM)
        always = value.op is None or value.op.repeats or value.op.always
        self.add(write, [value], listed, always=always, stays=True)
        return listed

    def named(self, number: WrittenNumber, name: str) -> Value:
        """Record a line that assigns a hyperparameter to a name, and return the value."""
        value = Value("tensor", hint=name)
        write = lambda names: operand(number.value, names)
        self.add(write, [number.value], value, stays=True)
        return value

    def layer(self) -> Value:
        """Return the layers of the parameters in the current context."""
        if self.context not in self.layers:
            layer = Value("list", hint="layer")
            self.layers[self.context] = layer
            write = lambda names: ("", ATOM)
            self.add(write, [], layer, joint=False, repeats=True, takes="layer")
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
        write = lambda names: (f"{names(value)}.numel()", ATOM)
        return self.live.number(count, Value("sizes"), write, (value,))

    @property
    def update(self) -> Value:
        """The update as the current link receives it."""
        assert self.flowing is not None, "a rule is asked when an update has come to it"
        return self.flowing

    def dtype(self) -> Value:
        """Return the dtype of the update."""
        u = self.update
        dtype = Value("tensor")
        self.add(lambda names: (f"{names(u)}[0].dtype", ATOM), [u], dtype)
        return dtype

    def record(
        self,
        kind: Kind | Literal["tuple"],
        out: Tensor,
        write: Write,
        args: list[Value],
        **kinds: Any,
    ) -> Tensor:
        """Record an operation. A tensor represents its result, and is returned.

        Args:
            kind: The kind of the result; "tuple" is a list that is a tuple in Python.
            out: The tensor that represents the result.
            write: The function that writes the operation.
            args: The values that it reads.
            **kinds: Other attributes of `Op`.
        """
        value = Value("list", elements="tuple") if kind == "tuple" else Value(kind)
        self.add(write, args, value, **kinds)
        return self.learn(out, value)
