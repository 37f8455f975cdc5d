"""Tapes: all that a step asks of torch and of programs, to be asked again in the next steps.

While a tape is on, a step runs as ever. What it did becomes one function, in which no link, list or
trace takes part: the operators on small tensors, such as norms and the numbers of live values, and
the launches of programs. A tape refuses what its function could not repeat: tensors whose home it
does not know, and Python that looks at what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchzero_clip.core.norms import divisions, in_two, readable
from torchzero_clip.engines.compiled.buffers import Buffer
from torchzero_clip.engines.compiled.program import Launch
from torchzero_clip.engines.compiled.recording import Noted, inverse
from torchzero_clip.engines.compiled.repeated import Again, Line, Repeated, listed, repeated

FACTS = """data_ptr dim element_size is_complex is_contiguous is_floating_point nelement numel
promote_types result_type size storage_offset stride untyped_storage __hash__ __len__"""
"""Functions that tell of a tensor what does not change while its form and its home do not."""
UNKNOWN = """argwhere masked_select nonzero unique unique_consecutive bernoulli bernoulli_ cauchy_
exponential_ geometric_ log_normal_ multinomial normal normal_ poisson random_ uniform_ rand
rand_like randint randint_like randn randn_like randperm"""
"""Functions whose result is of a form that hangs on values, or is another each time."""
HOMES = ("_base", "grad")
"""Attributes that are tensors which were there before."""
COPIES = ("clone", "contiguous", "detach", "reshape", "to", "view")
QUICKER = {Tensor.__rsub__: torch.rsub}
"""Functions of torch that do the same with less Python around it."""


class Tape(TorchFunctionMode):
    """What happens between `with tape:` and the end of the block.

    Attributes:
        refused: The reason why this cannot be repeated, if there is one.
        leaves: The tensors that were there before, those of buffers aside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: str | None = None
        self.leaves: list[Tensor] = []
        self._names: dict[int, str] = {}  # of objects, by their identity
        self._held: list[Any] = []  # so that no identity is that of two
        self._space: dict[str, Any] = {}  # what the function finds by name
        self._lines: list[Line] = []
        self._sessions = 0

    def refuse(self, why: str) -> None:
        """Note a reason why this cannot be repeated."""
        self.refused = self.refused or why

    # ------------------------------------------------------------------ what is noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is divisions:  # a divisor and a factor, whatever the ratio is
            if not readable(args[0]):
                return func(*args, **kwargs)
            first, rest = self._in_two(*args, **kwargs)
            return [("div", first), ("mul", rest)], False
        out = func(*args, **kwargs)
        if self.refused is None:
            self._note(func, args, kwargs, out)
        return out

    def _in_two(self, ratio: Tensor, dtype: torch.dtype, number: bool = False) -> tuple[Any, Any]:
        number &= ratio.numel() == 1
        out, uses = in_two(ratio, dtype, number), set[str]()
        text = f"{self._constant(in_two)}({self._term([ratio, dtype, number], uses)[1:-1]})"
        if number:
            pair = f"n{len(self._held)}"
            self._held.append(pair)
            self._lines.append(Line(f"{pair} = {text}", (pair,), frozenset(uses)))
            a, b = [self._number(f"{pair}[{i}]", {pair}, x) for i, x in enumerate(out)]
            return a, b
        self._assign(text, uses, set(), out)
        return out

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = func.__self__.__name__
            if attribute in HOMES or not isinstance(out, Tensor):
                return
        made = out if isinstance(out, (tuple, list)) else () if out is None else (out,)
        if name in FACTS.split():
            return
        indexes = args[1:2] if name in ("__getitem__", "__setitem__") else ()
        if name in UNKNOWN.split() or any([isinstance(x, Tensor) for x in indexes]):
            self.refuse(f"{name} is another each time")
        elif not all([isinstance(x, Tensor) for x in made]):
            self.refuse(f"{name} looks at what a tensor holds")
        elif "out" in kwargs or name.startswith("_fused"):
            self.refuse(f"{name} writes to several arguments")
        else:
            func = QUICKER.get(func, getattr(func, "__wrapped__", func))
            copied = name in COPIES and _same_form(args[0], out)
            self._call(func, args, kwargs, out, args[0] if copied else None)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, copied: Any) -> None:
        uses: set[str] = set()
        terms = [self._term(x, uses) for x in args]
        terms += [f"{key}={self._term(x, uses)}" for key, x in kwargs.items()]
        changes: set[str] = set()
        name = getattr(func, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__",):
            self._term(args[0], changes)
        elif name.startswith("__i") and name not in ("__invert__",):
            self.refuse(f"{name} may or may not write in place")
        text = f"{self._constant(func)}({', '.join(terms)})"
        self._assign(text, uses, changes, out, None if copied is None else self._term(copied, uses))

    def _assign(
        self, text: str, uses: set[str], changes: set[str], out: Any, copies: str | None = None
    ) -> None:
        """A line that makes a tensor, several, or none that is new."""
        several = isinstance(out, (tuple, list))
        made = list(out) if several else [] if out is None else [out]
        names = [] if any([id(x) in self._names for x in made]) else list(map(self._fresh, made))
        if names:
            text = f"{listed(names) if several else names[0]} = {text}"
        self._lines.append(Line(text, tuple(names), frozenset(uses), frozenset(changes), copies))

    def read(self, x: Tensor) -> float:
        """The number in a tensor, which the function reads again."""
        uses: set[str] = set()
        with self.paused():
            value = float(x)
        return self._number(f"float({self._term(x, uses)})", uses, value)

    def inverse(self, x: Noted) -> float:
        """1 / x, as another number that is known by its name."""
        return self._number(f"inverse({x.name})", {x.name}, inverse(x))

    def _number(self, text: str, uses: set[str], value: float) -> float:
        name = f"n{len(self._held)}"
        noted = Noted(value, name, self)
        self._held.append(noted)
        self._lines.append(Line(f"{name} = {text}", (name,), frozenset(uses)))
        return noted

    def open(self, parameters: Buffer, gradients: Buffer) -> None:
        """Note the buffers of a session."""
        self.know(parameters)
        self._name(gradients, f"gradients[{self._sessions}]")
        self._sessions += 1

    def know(self, buffer: Buffer) -> None:
        """Note a buffer that stays from step to step."""
        if id(buffer) not in self._names:
            self._name(buffer, self._constant(buffer))

    def _name(self, buffer: Buffer, name: str) -> None:
        self._held.append(buffer)
        self._names[id(buffer)] = name
        for i, t in enumerate(buffer.tensors):
            self._names.setdefault(id(t), f"{name}.tensors[{i}]")

    def launch(
        self, run: Callable[[Launch], Tensor | None], launch: Launch, numbers: Sequence[float]
    ) -> Tensor | None:
        """Run a program, and note it; `numbers` are those that it takes."""
        with self.paused():
            stats = run(launch)
        uses: set[str] = set()
        if not all([id(buffer) in self._names for buffer in launch.buffers]):
            self.refuse("a list lies in memory that does not last")
            return stats
        buffers = ", ".join([self._names[id(buffer)] for buffer in launch.buffers])
        held = [self._term(list(x), uses) for x in (numbers, launch.vectors, launch.scalars)]
        again = self._constant(Again(launch, len(numbers)))
        self._assign(f"{again}(run, [{buffers}], {', '.join(held)})", uses, {"memory"}, stats)
        return stats

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
        if isinstance(x, Tensor):
            if id(x) not in self._names:
                self.leaves.append(x)
                self._constant(x)
            uses.add(self._names[id(x)])
            return self._names[id(x)]
        if isinstance(x, Noted):
            uses.add(x.name)
            return x.name
        if type(x) in (list, tuple):
            terms = [self._term(item, uses) for item in x]
            return f"[{', '.join(terms)}]" if type(x) is list else f"({listed(terms)})"
        if type(x) in (int, bool) or x is None or x is Ellipsis:
            return repr(x)
        return self._constant(x)

    def _constant(self, x: Any) -> str:
        if id(x) in self._names:
            return self._names[id(x)]
        name = f"c{len(self._held)}"
        self._held.append(x)
        self._names[id(x)] = name
        self._space[name] = x
        return name

    def _fresh(self, x: Tensor) -> str:
        self._names[id(x)] = name = f"v{len(self._held)}"
        self._held.append(x)
        return name

    # ------------------------------------------------------------------ the function

    def function(self, outputs: Sequence[Tensor]) -> Repeated:
        """All that was noted as a function that returns the values of these tensors."""
        wanted: set[str] = set()
        returned = self._term(list(outputs), wanted)
        return repeated(self._lines, self._space, returned, wanted, self._at_home())

    def _at_home(self) -> set[str]:
        """The names of tensors in memory that was there before."""
        held = [x.tensors if isinstance(x, Buffer) else [x] for x in self._held]
        tensors = [t for some in held for t in some if isinstance(t, Tensor)]
        before = {id(t) for t in self.leaves}
        before |= {id(t) for x in self._held if isinstance(x, Buffer) for t in x.tensors}
        storages = {t.untyped_storage().data_ptr() for t in tensors if id(t) in before}
        return {self._names[id(t)] for t in tensors if t.untyped_storage().data_ptr() in storages}


def _same_form(x: Any, y: Any) -> bool:
    return (x.dtype, x.shape, x.stride(), x.device) == (y.dtype, y.shape, y.stride(), y.device)
