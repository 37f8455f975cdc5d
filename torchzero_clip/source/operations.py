"""Operations: what has been asked for so far, and what each tensor and number stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torchzero_clip.source.functions import Functions
from torchzero_clip.source.helpers import Helpers
from torchzero_clip.source.live_numbers import LiveNumbers
from torchzero_clip.source.symbols import ATOM, Context, Names, Op, Value, operand
from torchzero_clip.source.written_numbers import WrittenNumber


class Operations:
    """The operations of a step, with the values that they are of and make."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.known: dict[int, tuple[Any, Value]] = {}
        self.context, self.link, self.paused = Context(), "", False
        self.joins = False  # whether a rule about entries takes those of all groups together
        self.helpers, self.live = Helpers(), LiveNumbers()
        self.functions = Functions(self.helpers)
        self.layers: dict[Context, Value] = {}
        self.like: Value | None = None  # whose device constants of a rule are on
        self.flowing: Value | None = None  # whose dtype the update has

    def knows(self, x: Any) -> Value | None:
        """The value of a tensor or a number."""
        if isinstance(x, WrittenNumber):
            return x.value
        found = self.known.get(id(x)) if isinstance(x, Tensor) else None
        return None if found is None else found[1]

    def learn(self, tensor: Tensor, value: Value) -> Tensor:
        """Remember what a tensor stands for."""
        self.known[id(tensor)] = tensor, value
        return tensor

    def add(
        self,
        write: Callable[[Names], tuple[str, int]],
        args: Sequence[Value],
        out: Value | None = None,
        **kinds: Any,
    ) -> Value | None:
        """An operation; its value."""
        free = not args and self.context.flags is None  # a constant, needed by no mask
        joint = kinds.pop("joint", free or (bool(args) and all(value.joint for value in args)))
        op = Op(write, list(args), out, joint=joint, context=self.context, link=self.link, **kinds)
        if out is not None:
            out.made, out.joint, out.context = op, joint, self.context
        self.ops.append(op)
        return out

    def gathered(self, value: Value) -> Value:
        """Return the lists of all groups as one.

        Lists of a mask and of state have no name after their loop, so they are listed first.
        """
        of_state = value.made is not None and value.made.takes == "state"
        if self.context.flags is not None or of_state:
            return self._gathered(self._listed(value))
        return self._gathered(value)

    def _gathered(self, value: Value) -> Value:
        made = Value("list", hint=value.hint)
        write = lambda names: (names(value), ATOM)
        self.add(write, [value], made, joint=True, gathers=True, small=True)
        return made

    def _listed(self, value: Value) -> Value:
        """Return a list of the same tensors, with a name of its own."""
        made = Value("list", hint=value.hint, root=value)
        write = lambda names: (f"list({names(value)})", ATOM)
        always = value.made is None or value.made.repeats or value.made.always
        self.add(write, [value], made, always=always, stays=True)
        return made

    def named(self, number: WrittenNumber, name: str) -> Value:
        """A live value, with a line that gives it a name."""
        made = Value("tensor", hint=name)
        write = lambda names: operand(number.value, names)
        self.add(write, [number.value], made, stays=True)
        return made

    def layer(self) -> Value:
        """The layer of each parameter of this context."""
        if self.context not in self.layers:
            self.layers[self.context] = Value("list", hint="layer")
            out, kinds = self.layers[self.context], {"repeats": True, "takes": "layer"}
            self.add(lambda names: ("", ATOM), [], out, joint=False, **kinds)
        return self.layers[self.context]

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is written down meanwhile."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def size(self, value: Value, count: int) -> Any:
        """The number of entries of each tensor of a list."""
        write = lambda names: (f"{names(value)}.numel()", ATOM)
        return self.live.number(count, Value("sizes"), write, (value,))

    @property
    def update(self) -> Value:
        """The update as it flows."""
        assert self.flowing is not None, "a rule is asked when an update has come to it"
        return self.flowing

    def dtype(self) -> Value:
        """The dtype of the update."""
        u, made = self.update, Value("tensor")
        self.add(lambda names: (f"{names(u)}[0].dtype", ATOM), [u], made)
        return made

    def made(self, kind: Any, out: Tensor, write: Any, found: list[Value], **kinds: Any) -> Tensor:
        """A tensor that an operation makes; "tuple" is a list that Python has as a tuple."""
        value = Value("list", elements="tuple") if kind == "tuple" else Value(kind)
        self.add(write, found, value, **kinds)
        return self.learn(out, value)
