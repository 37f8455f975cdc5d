"""Recording, for compile=True: lists note down what is asked of them, and a kernel does it later.

A link runs as ever. Its lists are Recorded: each method adds a line to the tape of the bucket. When
somebody needs values (a norm, the end of the step) one compiled kernel does all that was noted, in
a single pass over memory. Nothing else knows that it happens.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.compiler import Compiler, Home
from torchzero_clip.core.kernel import BOOLEAN, Line, Ref
from torchzero_clip.core.norms import NAMED, Measure, statistics
from torchzero_clip.core.tensorlist import Operand, TensorList
from torchzero_clip.core.tensors import whole_of, wide

Value: TypeAlias = int
"""A line of the tape."""
Place: TypeAlias = int
"""The number of a home: of parameters, gradients, one state of every parameter, and so on."""

PARAMETERS: Place = 0
KERNELS = {(m.kind, m.p): m for m in (NAMED["l1"], NAMED["l2"], NAMED["linf"])}
"""What kernels measure, in float64."""
SINGLE = (torch.float32, torch.bfloat16, torch.float16)


class Recorded(TensorList):
    """A list whose values are noted on a tape: those of a home, or of a line that has none yet."""

    __slots__ = ("__weakref__", "_home", "_tape", "_value")

    def __init__(
        self, tape: Tape, *, home: Place | None = None, value: Value = -1, owned: bool = True
    ) -> None:
        self._tape, self._home, self._value = tape, home, value
        self.owned, self.room, self.norms, self.whole = owned, None, None, None
        tape.handles.add(self)

    @property
    def value(self) -> Value:
        """The line that holds the values now."""
        return self._value if self._home is None else self._tape.load(self._home)

    @property
    def dtype(self) -> torch.dtype:
        return self._tape.dtype(self.value)

    @property
    def tensors(self) -> list[Tensor]:
        """The values, for who looks at them and may write there: what was noted of them is done."""
        if self._home != PARAMETERS and self._home in self._tape.now:
            self._tape.run()
        return self.peek

    @tensors.setter
    def tensors(self, values: Sequence[Tensor]) -> None:
        self._home = self._tape.hold(values)

    @property
    def peek(self) -> list[Tensor]:
        if self._home is None or self._tape.pending(self._home):
            self._tape.run()
        assert self._home is not None
        return self._tape.homes[self._home].tensors

    def __len__(self) -> int:
        return self._tape.count

    def _settle(self) -> None:
        self._tape.run()

    def statistics(self, m: Measure) -> Tensor:
        return self._tape.measure(self, m)

    def apply(self) -> bool:
        """Subtract the update from the parameters; its values are not needed any more."""
        Recorded(self._tape, home=PARAMETERS).sub_(self)
        self.forget()
        return True

    def forget(self) -> None:
        """Need the values no more."""
        self._home, self.owned = PARAMETERS, False

    # ------------------------------------------------------------------ memory

    def borrow(self) -> Recorded:
        return Recorded(self._tape, home=self._home, value=self._value, owned=False)

    def own(self) -> Recorded:
        return self if self.owned else self._assign(self.value)

    def to(self, dtype: torch.dtype) -> Recorded:
        if self.dtype == dtype:
            return self
        return Recorded(self._tape, value=self._tape.cast(self.value, dtype))

    def clone(self) -> Recorded:
        return Recorded(self._tape, value=self.value)

    def copy_(self, source: TensorList) -> TensorList:
        kind, line = self._tape.ref(source) or ("", 0)
        if kind == "value":
            return self._assign(self._tape.cast(line, self.dtype))
        TensorList(self.own().tensors, owned=True).copy_(source)
        return self

    def _assign(self, value: Value) -> Recorded:
        """Write: into the home that is this list's own, otherwise somewhere new."""
        if self.owned and self._home is not None:
            self._tape.now[self._home] = value
        else:
            self._home, self._value, self.owned = None, value, True
        return self

    # ------------------------------------------------------------------ arithmetic

    def _write(self, name: str, *operands: Any) -> TensorList:
        line = self._tape.note(name, self.value, operands, keep=True)
        if line is not None:
            return self._assign(line)
        return self._at_once("_write", name, *operands)

    def _at_once(self, method: str, *args: Any) -> Recorded:
        """What no kernel takes, on the tensors themselves."""
        dtype = self.dtype
        out = getattr(TensorList(self.tensors, owned=self.owned), method)(*args)
        if not self.owned:
            self.tensors, self.owned = out.to(dtype).tensors, True
        return self

    def _new(self, name: str, *operands: Any) -> TensorList:
        line = self._tape.note(name, self.value, operands)
        if line is None:
            return TensorList(self.tensors)._new(name, *operands)
        return Recorded(self._tape, value=line)

    def add_(self, x: Operand, alpha: float | Tensor = 1) -> TensorList:
        if isinstance(x, (int, float)):
            return self._write("add", x * alpha)
        line = self._tape.note("add_scaled", self.value, (x, alpha), keep=True)
        return self._at_once("add_", x, alpha) if line is None else self._assign(line)

    def clamp_(self, low: Operand, high: Operand) -> TensorList:
        return self.maximum_(low).minimum_(high)

    def where(self, keep: Iterable[Tensor], other: TensorList | float) -> TensorList:
        keep = keep if isinstance(keep, TensorList) else list(keep)
        line = self._tape.note("where", self.value, (keep, other), keep=True)
        if line is None:
            return TensorList(self.tensors).where(keep, other)
        return Recorded(self._tape, value=line)

    def hypot(self, other: TensorList) -> TensorList:
        return self._new("hypot", other)

    def isfinite(self) -> TensorList:
        return self._new("isfinite")

    def isinf(self) -> TensorList:
        return self._new("isinf")

    def isnan(self) -> TensorList:
        return self._new("isnan")

    def positive(self) -> TensorList:
        return self._new("positive")


class Tape:
    """What is to be done with the tensors of one bucket.

    A line is (operator, operands): a value is computed from earlier ones, numbers, and rows, which
    are vectors with an entry a tensor.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        compiler: Compiler,
        key: Any,
        room: Callable[..., list[Tensor]] | None,
    ) -> None:
        self.count = len(params)
        self.compiler, self.key, self.room = compiler, key, room
        own = compiler.home((key, "parameters"), params, views=True)
        if own.shapes is None:
            own.shapes = [p.shape for p in params]
            own.sizes = [p.numel() for p in params]
        self.shapes, self.sizes = own.shapes, own.sizes
        self.homes: list[Home] = [own]
        self.slots: list[Place] = []  # homes for values that have none
        self.handles: weakref.WeakSet[Recorded] = weakref.WeakSet()
        self._clear()

    def _clear(self) -> None:
        self.lines: list[Line] = []
        self.dtypes: list[torch.dtype] = []
        self.now: dict[Place, Value] = {}
        self.loads: dict[Place, Value] = {}
        self.numbers: list[float] = []
        self.scalars: list[Tensor] = []
        self.rows: list[Tensor] = []

    # ------------------------------------------------------------------ homes

    def hold(self, tensors: Sequence[Tensor], name: Any = None) -> Place:
        """The place of these tensors; those with a name are known from the step before."""
        for place, home in enumerate(self.homes):
            if home.tensors[0] is tensors[0] and all(map(operator.is_, home.tensors, tensors)):
                return place
        known = Home(tensors) if name is None else self.compiler.home((self.key, name), tensors)
        self.homes.append(known)
        return len(self.homes) - 1

    def record(self, tensors: Sequence[Tensor], name: Any = None, owned: bool = True) -> TensorList:
        """Tensors as a list that records; as it is if they are not like the parameters."""
        place = self.hold(tensors, name)
        if self.alike(self.homes[place]):
            return Recorded(self, home=place, owned=owned)
        return TensorList(tensors, owned=owned)

    def record_like(self, tensors: TensorList) -> Recorded:
        """The parameters, or their gradients."""
        place = self.hold(tensors.tensors)
        home = self.homes[place]
        if place != PARAMETERS and list(map(Tensor.numel, home.tensors)) != self.sizes:
            pairs = zip(home.tensors, self.shapes, strict=True)
            wrong, right = next((t.shape, s) for t, s in pairs if t.numel() != s.numel())
            raise ValueError(
                f"got a gradient of shape {tuple(wrong)} for a parameter of {tuple(right)}: set "
                "the gradient to None when you change a parameter"
            )
        home.shapes = self.shapes
        return Recorded(self, home=place)

    def alike(self, home: Home) -> bool:
        """Whether these tensors have the shapes of the parameters."""
        if home.shapes is not self.shapes:
            if [t.shape for t in home.tensors] != self.shapes:
                return False
            if len({(t.dtype, t.device) for t in home.tensors}) > 1:
                return False
            home.shapes = self.shapes
        return True

    def load(self, home: Place) -> Value:
        """What is in a home, by now."""
        if home not in self.now:
            self.now[home] = self.loads[home] = len(self.lines)
            self._line("load", (("list", home),), self.homes[home].dtype)
        return self.now[home]

    def pending(self, home: Place) -> bool:
        """Whether something else is to be written there."""
        return home in self.now and self.now[home] != self.loads.get(home)

    # ------------------------------------------------------------------ lines

    def dtype(self, value: Value) -> torch.dtype:
        return self.dtypes[value]

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if self.dtypes[value] == dtype:
            return value
        return self._line("to", (("value", value), ("dtype", str(dtype))), dtype)

    def note(
        self, name: str, value: Value, operands: Sequence[Any], keep: bool = False
    ) -> Value | None:
        """A new line, or None where an operand is of a shape that a kernel does not take."""
        refs = [self.ref(x) for x in operands]
        if None in refs:
            return None
        known = [ref for ref in refs if ref is not None]
        if name == "div" and known[0][0] in ("row", "number"):
            name = "mul"  # a division of every entry takes as long as all the rest
            self._invert(known[0])
        dtype = mine = self.dtypes[value]
        for kind, index in known:
            if kind == "value" and name != "where":
                dtype = torch.promote_types(dtype, self.dtypes[index])
        if name in BOOLEAN:
            dtype = torch.bool
        if name == "where":
            known = [
                ("value", self.cast(ref[1], dtype)) if i == 1 and ref[0] == "value" else ref
                for i, ref in enumerate(known)
            ]
        line = self._line(name, (("value", value), *known), dtype)
        return self.cast(line, mine) if keep else line

    def ref(self, x: Any) -> Ref | None:
        """An operand as lines name it."""
        if isinstance(x, Recorded) and x._tape is self:
            return "value", x.value
        if isinstance(x, (int, float)):
            self.numbers.append(float(x))
            return "number", len(self.numbers) - 1
        if isinstance(x, Tensor):
            return self._row(x) if x.dim() else self._scalar(x)
        tensors = x.peek if isinstance(x, TensorList) else x
        if not isinstance(tensors[0], Tensor):
            like = self.homes[PARAMETERS].tensors[0]
            return self._row(torch.tensor(tensors, dtype=torch.float64, device=like.device))
        if tensors[0].dim() == 0 and not any([t.dim() for t in tensors]):
            vector = whole_of(tensors)
            return self._row(torch.stack(list(tensors)) if vector is None else vector)
        place = self.hold(tensors)
        return ("value", self.load(place)) if self.alike(self.homes[place]) else None

    def _invert(self, ref: Ref) -> None:
        kind, i = ref
        if kind == "row":
            self.rows[i] = self.rows[i].to(wide(self.rows[i].device)).reciprocal()
        else:
            x = self.numbers[i]
            self.numbers[i] = 1 / x if x else math.copysign(math.inf, x)

    def _row(self, x: Tensor) -> Ref:
        self.rows.append(x.detach().clone())  # it may change before the tape runs
        return "row", len(self.rows) - 1

    def _scalar(self, x: Tensor) -> Ref:
        if x.device.type == "cpu":
            return self.ref(float(x))  # type: ignore[return-value]
        self.scalars.append(x.detach().clone())
        return "scalar", len(self.scalars) - 1

    def _line(self, name: str, refs: tuple[Ref, ...], dtype: torch.dtype) -> Value:
        self.lines.append((name, refs))
        self.dtypes.append(dtype)
        return len(self.lines) - 1

    # ------------------------------------------------------------------ doing it

    def run(self, measured: tuple[Measure, Value] | None = None) -> Tensor | None:
        """Do what was noted, so that every list that is still in use has its values in a home."""
        used = {handle._home for handle in self.handles}
        stores = {
            home: value
            for home, value in self.now.items()
            if self.pending(home) and (home in used or home not in self.slots)
        }
        homeless = [handle for handle in self.handles if handle._home is None]
        moved: dict[Value, Place] = {}
        for handle in sorted(homeless, key=lambda one: (one._value, not one.owned)):
            value = handle._value
            if handle.owned or value not in moved:
                moved[value] = self._slot(self.dtypes[value], used)
                stores[moved[value]] = value
                used.add(moved[value])
            handle._home = moved[value]
        sources = {
            place: self.lines[value][1][0][1]
            for place, value in stores.items()
            if self.lines[value][0] == "load"
        }
        stats = None
        if measured or len(sources) < len(stores) or set(sources.values()) & set(stores):
            stats = self.compiler.run(self, stores, measured)
        else:  # copies, which are no work for a kernel
            for place, source in sources.items():
                target = self.homes[place].tensors
                torch._foreach_copy_(target, self.homes[source].tensors)
        self._clear()
        return stats

    def _settle(self) -> None:
        self.run()

    def measure(self, x: Recorded, m: Measure) -> Tensor:
        """The statistic of each tensor of a list, where it can be by the kernel that makes it."""
        how = KERNELS.get((m.kind, m.p))
        stats = None
        here = self.homes[PARAMETERS].tensors[0].device.type == "cpu"
        if how is not None and here and self.dtype(x.value) in SINGLE:
            if x._home is None or self.pending(x._home):
                stats = self.run((how, x.value))
            else:
                stats = self.compiler.run(self, {}, (how, x.value))
        return statistics(x.peek, m) if stats is None else stats

    def end(self) -> None:
        """Give lists that outlive the step memory of their own: what is kept is used again."""
        for handle in list(self.handles):
            if handle._home in self.slots:
                handle.tensors = [t.clone() for t in handle.peek]

    def _slot(self, dtype: torch.dtype, used: set[Place | None]) -> Place:
        """A home that nobody looks at: what the optimizer keeps, or new memory."""
        for slot in self.slots:
            if slot not in used and self.homes[slot].dtype == dtype:
                return slot
        kept = len(self.slots)
        if self.room is not None and kept < 2:
            self.slots.append(self.hold(self.room(bool(kept)), ("room", kept)))
            return self._slot(dtype, used)
        like = self.homes[0].tensors
        self.slots.append(self.hold([torch.empty_like(t, dtype=dtype) for t in like]))
        return self.slots[-1]
