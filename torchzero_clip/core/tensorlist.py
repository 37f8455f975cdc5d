"""TensorList: many tensors that read like one, on torch's fused `_foreach_*` operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.norms.scratch import Rows
from torchzero_clip.core.tensors import MANY, PLAIN, SMALL, is_sharded, whole_of, wide

Operand: TypeAlias = "float | Tensor | TensorList | Sequence[Tensor]"
"""A number, a 0-dim tensor, a vector with a number for each tensor, a TensorList, or a list of one
(broadcastable) tensor for each."""
FILL = ("mul", "div", "sub")  # what runs from borrowed memory straight into the kept


class TensorList:
    """A handle around a list of tensors, copy on write.

    Methods that end in an underscore write what they are called on, as in torch. When the memory is
    *borrowed* (a gradient, a parameter, another link's state) the first such call moves the handle
    to memory of its own, so nobody else sees the write. Plain names make a new list.

    No method reads a device value on the host: a 0-dim tensor may stand wherever a number may.
    """

    __slots__ = ("norms", "owned", "room", "tensors", "whole")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        owned: bool = False,
        room: Callable[[], list[Tensor]] | None = None,
    ) -> None:
        self.tensors = list(tensors)
        self.owned = owned
        self.room = room  # memory that the optimizer keeps for this list, so that none is allocated
        self.norms: Callable[[], Tensor] | None = None  # set by NormRule, see NormRule.measure
        self.whole: Tensor | None = None  # the one that these are the rows of, if that is known

    @property
    def peek(self) -> list[Tensor]:
        """The tensors, for who only reads them, and now."""
        return self.tensors

    @property
    def _origin(self) -> list[Tensor]:
        """The tensors, or those that a list which is not computed yet starts from."""
        return self.tensors

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return self.tensors[0].dtype

    def _settle(self) -> None:
        """Compute what is put off: before its sources change, or since state must move."""
        _ = self.tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __repr__(self) -> str:
        kind = "owned" if self.owned else "borrowed"
        return f"TensorList({len(self)} tensors, {kind})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a TensorList has no {name!r}: write u.map(fn) for a function of one tensor, or "
            "subclass TensorwiseTransform"
        )

    def _no_operator(self, other: object) -> Any:
        raise TypeError("a TensorList has methods, no operators: write u.mul(x), u.add(x), u.neg()")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operator
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = _no_operator

    # ------------------------------------------------------------------ memory

    def borrow(self) -> TensorList:
        """The same tensors, to be copied before they are written."""
        return TensorList(self.tensors)

    def own(self) -> TensorList:
        """Move to memory that nobody else sees, unless it is that already."""
        return self if self.owned else self._move(self.tensors[0].dtype)

    def to(self, dtype: torch.dtype) -> TensorList:
        """This list when it has that dtype, otherwise a converted copy."""
        if not self.tensors or self.tensors[0].dtype == dtype:
            return self
        return TensorList(self.tensors, room=self.room)._move(dtype)

    def _move(self, dtype: torch.dtype) -> TensorList:
        room = self.room() if self.room is not None else None
        if room is None or room[0].dtype != dtype:
            return self._become(_copies(self.tensors, dtype))
        return self._enter(room, self.tensors)

    def _enter(self, room: list[Tensor], values: list[Tensor]) -> TensorList:
        """Move to other memory, with these values."""
        whole = room.whole if isinstance(room, Rows) else None
        if whole is not None and values[0].dtype == whole.dtype:
            torch.stack(values, out=whole)
        else:
            _copy_into(room, values)
        self._become(room).whole = whole
        return self

    def _write(self, name: str, *operands: Any) -> TensorList:
        """Run a foreach operator in place, or into new memory when this memory is borrowed."""
        args = self._arguments(name, operands)
        if not self.owned and self.room is None and not self._promotes(args):
            return self._become(_foreach(name, self.tensors, *args))
        if name in FILL and not self.owned and self._fill(getattr(torch, name), args[0]):
            return self
        whole = self.own()._joined()
        columns = [] if whole is None else [_column(x, whole) for x in operands]
        if whole is None or any([column is None for column in columns]):
            _foreach(name + "_", self.tensors, *args)
        else:
            operator = getattr(whole, name + "_")
            operator(*columns[:2], value=columns[2]) if columns[2:] else operator(*columns)
        return self

    def _promotes(self, args: tuple[Any, ...]) -> bool:
        """Whether an operand would change the dtype of 0-dim tensors; in place it cannot."""
        firsts = [x[0] if isinstance(x, (list, tuple)) and x else x for x in args]
        dtype = self.tensors[0].dtype
        return any([isinstance(x, Tensor) and x.dtype != dtype for x in firsts])

    def _fill(self, operator: Any, x: Any) -> bool:
        """Run an operator from borrowed memory straight into the kept: one pass instead of two."""
        room = self._target() if self._large() else None
        if room is None:
            return False
        each = x if isinstance(x, (list, tuple)) else [x] * len(room)
        for source, operand, out in zip(self.tensors, each, room, strict=True):
            operator(source, operand, out=out)
        self._become(room)
        return True

    def _joined(self) -> Tensor | None:
        """The tensor whose rows these are: step counts and the like, and small tensors of state."""
        if self.whole is None:
            self.whole = whole_of(self.tensors)
        return self.whole

    def _large(self) -> bool:
        """Whether a call for each tensor is worth a pass over memory."""
        return sum(map(Tensor.numel, self.tensors)) >= SMALL * len(self)

    def _target(self) -> list[Tensor] | None:
        """Where an operator with out= may write: its own memory, or what is kept for the list."""
        room = self.tensors if self.owned else self.room() if self.room is not None else None
        fits = room and room[0].dtype == self.tensors[0].dtype and type(room[0]) is Tensor
        return room if fits else None

    def _become(self, tensors: Sequence[Tensor]) -> TensorList:
        self.tensors, self.owned, self.room, self.whole = list(tensors), True, None, None
        return self

    def _new(self, name: str, *operands: Any) -> TensorList:
        """Run a foreach operator into a new list."""
        return TensorList(
            _foreach(name, self.tensors, *self._arguments(name, operands)), owned=True
        )

    def _arguments(self, name: str, operands: Sequence[Any]) -> tuple[Any, ...]:
        """Operands as torch takes them."""
        if name in ("mul", "div"):
            return tuple([self._scale(x) for x in operands])
        if name in ("add", "sub"):
            return (self._each(self._as_tensors(operands[0])),)
        if name == "lerp":
            return self._each(operands[0]), self._weight(operands[1])
        return tuple([self._each(x) for x in operands])

    def _each(self, x: Operand) -> Any:
        """An operand for operators that would read a 0-dim tensor on the host: one per element."""
        if isinstance(x, TensorList):
            return x.tensors
        if isinstance(x, Tensor):
            return list(x.unbind()) if x.dim() else [x] * len(self)
        return x

    def _scale(self, x: Operand) -> Any:
        """An operand for mul and div, which take a 0-dim tensor of their own device as it is."""
        x, first = self._as_tensors(x), self.tensors[0]
        if isinstance(x, Tensor) and x.dim() == 0 and not is_sharded(first):
            return x if x.device == first.device else [x] * len(self)
        return self._each(x)

    def _as_tensors(self, x: Operand) -> Operand:
        """Numbers for many tensors on CPU as 0-dim tensors: torch would make one for every call."""
        first = self.tensors[0]
        number = isinstance(x[0] if isinstance(x, (list, tuple)) and x else x, (int, float))
        if not number or len(self) < MANY or not first.dim():
            return x
        if first.device.type != "cpu" or type(first) not in PLAIN:
            return x
        double = first.dtype in (torch.float64, torch.complex128)
        numbers = torch.tensor(x, dtype=torch.float64 if double else torch.float32, device="cpu")
        return numbers if numbers.dim() == 0 else list(numbers.unbind())

    def _weight(self, x: Operand) -> Any:
        """An operand for lerp, which insists on one dtype."""
        each = self._each(x)
        if isinstance(each, (int, float)):
            return each
        return [w.to(t.dtype) for w, t in zip(each, self.tensors, strict=True)]

    # ------------------------------------------------------------------ arithmetic

    def mul(self, x: Operand) -> TensorList:
        return self._new("mul", x)

    def mul_(self, x: Operand) -> TensorList:
        return self._write("mul", x)

    def div(self, x: Operand) -> TensorList:
        return self._new("div", x)

    def div_(self, x: Operand) -> TensorList:
        return self._write("div", x)

    def add(self, x: Operand) -> TensorList:
        return self._new("add", x)

    def add_(self, x: Operand, alpha: float | Tensor = 1) -> TensorList:
        """self + alpha · x"""
        if isinstance(x, (int, float)):
            return self._write("add", x * alpha)
        if isinstance(alpha, Tensor):  # alpha= would read it on the host
            return self._write("addcmul", x, alpha)
        if alpha == 1:
            return self._write("add", x)
        name = "add" if not self.owned and self.room is None else "add_"
        memory = self.tensors if name == "add" else self.own().tensors
        out = _foreach(name, memory, self._each(x), alpha=alpha)
        return self._become(out) if name == "add" else self

    def sub(self, x: Operand) -> TensorList:
        return self._new("sub", x)

    def sub_(self, x: Operand) -> TensorList:
        return self._write("sub", x)

    def lerp(self, end: Operand, weight: Operand) -> TensorList:
        return self._new("lerp", end, weight)

    def lerp_(self, end: Operand, weight: Operand) -> TensorList:
        """self + weight · (end - self)"""
        return self._write("lerp", end, weight)

    def addcmul_(self, a: TensorList, b: TensorList, value: float | Tensor = 1) -> TensorList:
        """self + value · a · b"""
        if isinstance(value, Tensor):
            return self._write("addcmul", a.mul(value), b)
        return self._write("addcmul", a, b, value)

    def clamp(self, low: Operand, high: Operand) -> TensorList:
        return self._new("clamp_min", low).minimum_(high)

    def clamp_(self, low: Operand, high: Operand) -> TensorList:
        """low where self is below, high where it is above; NaN stays NaN"""
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and self._large():
            room = self._target()
            if room is not None:
                for t, out in zip(self.tensors, room, strict=True):
                    torch.clamp(t, low, high, out=out)
                return self._become(room)
        return self.maximum_(low).minimum_(high)

    def maximum(self, x: Operand) -> TensorList:
        return self._new("clamp_min", x)

    def maximum_(self, x: Operand) -> TensorList:
        return self._write("clamp_min", x)

    def minimum_(self, x: Operand) -> TensorList:
        return self._write("clamp_max", x)

    def neg(self) -> TensorList:
        return self._new("neg")

    def abs(self) -> TensorList:
        return self._new("abs")

    def abs_(self) -> TensorList:
        return self._write("abs")

    def sign(self) -> TensorList:
        return self._new("sign")

    def sign_(self) -> TensorList:
        return self._write("sign")

    def sqrt(self) -> TensorList:
        return self._new("sqrt")

    def sqrt_(self) -> TensorList:
        return self._write("sqrt")

    def reciprocal_(self) -> TensorList:
        return self._write("reciprocal")

    def clone(self) -> TensorList:
        return TensorList(_copies(self.tensors, self.tensors[0].dtype), owned=True)

    def copy_(self, source: TensorList) -> TensorList:
        """Take the values of `source`, keeping this list's dtype."""
        if not self.owned and self.room is None:
            return self._become(_copies(source.tensors, self.tensors[0].dtype))
        if not self.owned and self.room is not None:
            return self._enter(self.room(), source.tensors)
        _copy_into(self.tensors, source.tensors)
        return self

    # ------------------------------------------------------------------ where torch has no foreach

    def where(self, keep: Iterable[Tensor], other: TensorList | float) -> TensorList:
        """A new list: these values where `keep` holds (a mask or flag a tensor), or other."""
        if not isinstance(other, TensorList):
            rows = zip(keep, self.tensors, strict=True)
            return TensorList([torch.where(k, a, other) for k, a in rows], owned=True)
        pairs = zip(keep, self.tensors, other.tensors, strict=True)
        return TensorList([torch.where(k, a, b.to(a.dtype)) for k, a, b in pairs], owned=True)

    def hypot(self, other: TensorList) -> TensorList:
        """A new list: √(self² + other²), in range whatever the squares are."""
        rows = zip(self.tensors, other.tensors, strict=True)
        return TensorList([torch.hypot(a, b) for a, b in rows], owned=True)

    def isfinite(self) -> TensorList:
        """A new list: where entries are neither infinite nor NaN."""
        return self.map(torch.isfinite)

    def isinf(self) -> TensorList:
        """A new list: where entries are infinite."""
        return self.map(torch.isinf)

    def isnan(self) -> TensorList:
        """A new list: where entries are not a number."""
        return self.map(torch.isnan)

    def positive(self) -> TensorList:
        """A new list: where entries are above zero."""
        return self.map(_positive)

    def map(self, fn: Callable[[Tensor], Tensor]) -> TensorList:
        """A new list: `fn` of each tensor."""
        return TensorList([fn(t) for t in self.tensors], owned=True)

    def stack(self) -> Tensor:
        """One vector of these 0-dim tensors, in float64 (float32 where the device has none)."""
        vector = self._joined()
        dtype = wide(self.tensors[0].device)
        if vector is None:
            return torch.stack(self.tensors).to(dtype)
        return vector.to(dtype, copy=True)


def _column(x: Any, whole: Tensor) -> Any:
    """An operand for all rows at once, or None if it does not come in one."""
    if isinstance(x, TensorList):
        return None if x.whole is None or x.whole.shape != whole.shape else x.whole
    if isinstance(x, Tensor) and x.dim() > 1:
        return None
    if isinstance(x, (list, tuple)):
        if not isinstance(x[0], (int, float)):
            return None
        x = torch.tensor(x, dtype=whole.dtype, device=whole.device)
    if isinstance(x, Tensor):
        return x.to(whole.dtype).view(-1, *[1] * (whole.dim() - 1)) if x.dim() else x
    return x


def _positive(t: Tensor) -> Tensor:
    return t > 0


def _foreach(name: str, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    return getattr(torch, "_foreach_" + name)(tensors, *args, **kwargs)


def _copies(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if tensors[0].dtype != dtype or not hasattr(torch, "_foreach_clone"):
        return [t.to(dtype, copy=True) for t in tensors]
    return list(torch._foreach_clone(tensors))


def _copy_into(target: list[Tensor], source: Sequence[Tensor]) -> None:
    if target and is_sharded(target[0]):  # torch has no _foreach_copy_ for DTensor
        for t, s in zip(target, source, strict=True):
            t.copy_(s)
    else:
        torch._foreach_copy_(target, list(source))
