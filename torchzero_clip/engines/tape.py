"""Tapes: all that a step asks of torch and of programs, to be asked again in the next steps.

While a tape is on, a step runs as ever. What it did becomes one function, in which no link and no
list takes part: the operators on tensors and numbers, and the launches of programs. A tape refuses
what its function could not repeat: tensors whose home it does not know, and Python that looks at
what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchzero_clip.core import norms
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.calls import QUICKER, copies, tells_a_fact, why_not
from torchzero_clip.engines.noted import Noted
from torchzero_clip.engines.repeated import Line, Repeated, base, listed, repeated


class Tape(TorchFunctionMode):
    """What happens between `with tape:` and the end of the block.

    Args:
        steady: Whether norm rules scale twice in every step; otherwise the second time is where a
            ratio is so far from 1 that it counts.

    Attributes:
        refused: The reason why this cannot be repeated, if there is one.
        leaves: The tensors that were there before, those of buffers aside.
    """

    def __init__(self, steady: bool = True) -> None:
        super().__init__()
        self.steady = steady
        self.refused: str | None = None
        self.leaves: list[Tensor] = []
        self._names: dict[int, str] = {}  # of objects, by their identity
        self._lists: dict[tuple[int, ...], str] = {}  # of lists, by the identities in them
        self._held: list[Any] = []  # so that no identity is that of two
        self._lasting: list[Tensor] = []  # in memory that stays from step to step
        self._space: dict[str, Any] = {}  # what the function finds by name
        self._lines: list[Line] = []
        self._sessions, self._inside = 0, False
        self._only: tuple[str, set[str]] | None = None  # a condition, and the names in it

    def refuse(self, why: str) -> None:
        """Note a reason why this cannot be repeated."""
        self.refused = self.refused or why

    # ------------------------------------------------------------------ what is noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is norms.in_two and norms.readable(args[0]):
            return self._scales(*args, **kwargs)
        self._inside = True  # arithmetic with noted numbers is part of the call
        try:
            out = func(*args, **kwargs)
        finally:
            self._inside = False
        if self.refused is None:
            self._look(func, args, kwargs, out)
        return out

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Note what a function of torch did, or refuse it."""
        if tells_a_fact(func, out):
            return
        name = getattr(func, "__name__", "")
        if (why := why_not(name, args, out)) is not None:
            self.refuse(why)
        else:
            ours = hasattr(func, "__wrapped__")
            changes: set[str] = set()
            if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
                self._term(args if ours else args[0], changes)
                changes = {name for name in changes if name[0] in "cgv"}  # no numbers
            if "out" in kwargs:
                self._term(kwargs["out"], changes)
            func = QUICKER.get(func, func.__wrapped__ if ours else func)
            copied = args[0] if copies(name, args[0] if args else None, out) else None
            self.note(func, args, out, kwargs, changes, copied)

    def note(
        self,
        func: Any,
        args: Sequence[Any],
        out: Any,
        kwargs: dict[str, Any] | None = None,
        changes: Iterable[str] = (),
        copied: Any = None,
    ) -> None:
        """Note a call, what it made, and the names of what it changes.

        What it made is a tensor, a list of them, or nothing that is new. `copied` is what it has
        the values of.
        """
        uses: set[str] = set()
        terms = [self._term(x, uses) for x in args]
        terms += [f"{key}={self._term(x, uses)}" for key, x in (kwargs or {}).items()]
        text = f"{self._constant(func)}({', '.join(terms)})"
        each = list(out) if isinstance(out, (tuple, list)) else [] if out is None else [out]
        name = None
        if each and not any([id(x) in self._names for x in each]):
            name = self._fresh(out)
            text = f"{name} = {text}"
        copies = None if copied is None else self._term(copied, set())
        self._line(text, name, uses, changes, copies if copies == base(copies or "") else None)

    def _line(
        self,
        text: str,
        name: str | None,
        uses: Iterable[str],
        changes: Iterable[str] = (),
        copies: str | None = None,
    ) -> None:
        makes = () if name is None else (name,)
        if self._only is not None:
            only, names = self._only
            text = f"if {only}: {text}" if name is None else f"{text} if {only} else None"
            uses, copies = {*uses, *names}, None
        self._lines.append(Line(text, makes, frozenset(uses), frozenset(changes), copies))

    # ------------------------------------------------------------------ numbers

    def compute(self, text: str, operands: Sequence[Any], value: float) -> float:
        """The value of an expression, in which {0} and {1} stand for the operands."""
        if self._inside:
            return value
        uses: set[str] = set()
        text = text.format(*[self._term(x, uses) for x in operands])
        noted = Noted(value, f"n{len(self._held)}", self)
        self._held.append(noted)
        self._line(f"{noted.name} = {text}", noted.name, uses)
        return noted

    def expect(self, text: str, operands: Sequence[Any]) -> None:
        """Note a condition that must hold where the step is repeated."""
        if self._inside:
            return
        uses: set[str] = set()
        text = text.format(*[self._term(x, uses) for x in operands])
        line = Line(f"if not {text}: return None", (), frozenset(uses), expected=True)
        self._lines.append(line)

    def read(self, x: Tensor) -> float:
        """The number in a tensor, which the function reads again."""
        with self.paused():
            value = float(x)
        return self.compute("float({0})", (x,), value)

    def _scales(
        self, ratio: Tensor, dtype: torch.dtype, number: bool = False
    ) -> Iterator[tuple[str, Any]]:
        """`norms.in_two`, noted."""
        if number and ratio.numel() == 1:
            with self.paused():
                value = norms.factor_of(ratio, dtype)
            function = self._constant(norms.factor_of)
            factor = self.compute(f"{function}({{0}}, {{1}})", (ratio, dtype), value)
            yield from self.halves(factor, dtype) if self.steady else [("mul", factor)]
            return
        with self.paused():
            made = _pair(ratio, dtype, True)
            same = norms.all_ones(ratio)
        if same and not self.steady:
            self.refuse("nothing is scaled, and no memory is kept for that")
            return
        self.note(_pair, (ratio, dtype, self.steady), made)
        yield "mul", made[0]
        with self._where("{} is not None", made[1]):
            yield "div", made[1]

    def halves(
        self, factor: float, dtype: torch.dtype, in_place: bool = False
    ) -> Iterator[tuple[str, float]]:
        """`norms.halves` of a number, noted, as a factor and a divisor.

        What is multiplied `in_place` stays as it is where the factor is 1.
        """
        if self._inside:
            yield from zip(("mul", "div"), norms.halves(float(factor), dtype), strict=True)
            return
        text = f"{self._constant(norms.halves)}({{0}}, {{1}})"
        rest, divisor = [
            self.compute(f"{text}[{i}]", (factor, dtype), x)
            for i, x in enumerate(norms.halves(float(factor), dtype))
        ]
        with self._where("{} != 1", rest) if in_place else nullcontext():
            yield "mul", rest
        with self._where("{} != 1", divisor):
            yield "div", divisor

    @contextmanager
    def _where(self, text: str, x: Any) -> Iterator[None]:
        """Have what happens inside happen again where a condition holds; always for programs."""
        uses: set[str] = set()
        self._only = None if self.steady else (text.format(self._term(x, uses)), uses)
        try:
            yield
        finally:
            self._only = None

    # ------------------------------------------------------------------ memory that stays

    def open(self, parameters: Buffer, gradients: Buffer) -> None:
        """Note the buffers of a session."""
        self.know(parameters)
        self._name(gradients, f"gradients[{self._sessions}]")
        self._sessions += 1

    def know(self, buffer: Buffer) -> None:
        """Note a buffer that stays from step to step."""
        if not self.knows(buffer):
            self._name(buffer, self._constant(buffer))

    def knows(self, buffer: Buffer) -> bool:
        """Whether a buffer was noted."""
        return id(buffer) in self._names

    def _name(self, buffer: Buffer, name: str) -> None:
        self._held.append(buffer)
        self._names[id(buffer)] = name
        self._lasting += buffer.tensors
        self._lists.setdefault(tuple(map(id, buffer.tensors)), f"{name}.tensors")
        for i, t in enumerate(buffer.tensors):
            self._names.setdefault(id(t), f"{name}.tensors[{i}]")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let what happens inside pass, as if there were no tape."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ names

    def _term(self, x: Any, uses: set[str]) -> str:
        """An argument as the function spells it; its names are added to `uses`."""
        if isinstance(x, Tensor) and id(x) not in self._names:
            self.leaves.append(x)
            self._lasting.append(x)
            self._constant(x)
        if isinstance(x, (Tensor, Buffer)):
            name = self._names[id(x)]
            uses |= {name, base(name)}
            return name
        if isinstance(x, Noted):
            uses |= {x.name, base(x.name)}
            return x.name
        if type(x) in (list, tuple):
            return self._list(x, uses)
        if type(x) in (int, bool) or x is None or x is Ellipsis:
            return repr(x)
        return self._constant(x)

    def _list(self, x: Sequence[Any], uses: set[str]) -> str:
        """A list as the function spells it: by its name where it was made, or lasts."""
        terms = [self._term(item, uses) for item in x]
        key = tuple(map(id, x))
        tensors = bool(x) and all([isinstance(item, Tensor) for item in x])
        if tensors and key not in self._lists and all([base(t) in self._space for t in terms]):
            self._lists[key] = self._constant(list(x))
        if tensors and key in self._lists:
            uses.add(base(self._lists[key]))
            return self._lists[key]
        return f"[{', '.join(terms)}]" if type(x) is list else f"({listed(terms)})"

    def _constant(self, x: Any) -> str:
        if id(x) in self._names:
            return self._names[id(x)]
        name = f"c{len(self._held)}"
        self._held.append(x)
        self._names[id(x)] = name
        self._space[name] = x
        return name

    def _fresh(self, x: Any) -> str:
        """A name for a tensor that was made, or for a list of them."""
        name = f"v{len(self._held)}"
        self._held.append(x)
        if isinstance(x, Tensor):
            self._names[id(x)] = name
            return name
        self._lists[tuple(map(id, x))] = name
        self._names |= {id(t): f"{name}[{i}]" for i, t in enumerate(x)}
        return name

    # ------------------------------------------------------------------ the function

    def function(self, outputs: Sequence[Tensor]) -> Repeated | None:
        """All that was noted as a function that returns the values of these tensors."""
        wanted: set[str] = set()
        returned = self._term(list(outputs), wanted)
        return repeated(self._lines, self._space, returned, wanted, self._at_home())

    def close(self) -> None:
        """Let go of everything; what noted numbers still hold is empty."""
        for held in vars(self).values():
            if isinstance(held, (list, dict)):
                held.clear()
        self._inside = True

    def _at_home(self) -> set[str]:
        """The names of tensors in memory that was there before."""
        made = [t for x in self._held for t in (x if isinstance(x, (list, tuple)) else [x])]
        tensors = [t for t in (*self._lasting, *made) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in self._lasting}
        return {self._names[id(t)] for t in tensors if t.untyped_storage().data_ptr() in storages}


def _pair(ratio: Tensor, dtype: torch.dtype, always: bool) -> list[Any]:
    """The factor and the divisor; unless `always`, None for one that is 1."""
    rest, divisor = [x for _, x in norms.in_two(ratio, dtype)]
    return [rest, divisor if always or not norms.all_ones(divisor) else None]
