"""TensorList: many tensors that read like one, on torch's fused `_foreach_*` operators."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from torchzero_clip.core import norms
from torchzero_clip.core.foreach import (
    OUT,
    STAND_INS,
    arguments,
    copy_into,
    fill_,
    foreach,
    operand,
    stand_in,
    vector_operand,
)
from torchzero_clip.core.norms import Measure, SliceRows
from torchzero_clip.core.small_tensors import copies
from torchzero_clip.core.tensor_kinds import SMALL, all_real, shared_memory, storages, wide

Operand: TypeAlias = "float | Tensor | TensorList | Sequence[Tensor]"
"""A number, a 0-dim tensor, a vector with a number for each tensor, a TensorList, or a list of one
(broadcastable) tensor for each."""
Workspace: TypeAlias = "Callable[[Sequence[Tensor], torch.dtype], list[Tensor] | None] | None"
"""A function that gives memory kept from step to step for a list to move to, or None. It is called
with the tensors of the list, and the dtype that they will have there."""
Verb: TypeAlias = "Callable[[TensorList], Tensor] | None"
"""How a list is measured: see NormRule.measure."""
Unary: TypeAlias = "Callable[[TensorList], TensorList]"
Binary: TypeAlias = "Callable[[TensorList, Operand], TensorList]"
M = TypeVar("M", bound=Callable[..., Any])
L = TypeVar("L", bound="TensorList")
R = TypeVar("R")


def _both(name: str, says: str) -> tuple[Unary, Unary]:
    """The methods of an operator of one list: a new list, and in place."""

    def new(self: TensorList) -> TensorList:
        return self._new(name)

    def write(self: TensorList) -> TensorList:
        return self._write(name)

    return _named(name, f"A new list: {says}", new), _named(f"{name}_", says, write)


def _with(name: str, says: str, operator: str = "") -> tuple[Binary, Binary]:
    """The methods of an operator of a list and an operand, of this name unless one is given."""

    def new(self: TensorList, x: Operand) -> TensorList:
        return self._new(operator or name, x)

    def write(self: TensorList, x: Operand) -> TensorList:
        return self._write(operator or name, x)

    return _named(name, f"A new list: {says}", new), _named(f"{name}_", says, write)


def call_user(name: str, function: Callable[..., R], *args: Any) -> R:
    """Return function(*args), where the function is a user's and sees tensors of a list.

    Args:
        name: The name of the function in errors.
    """
    try:
        return function(*args)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        raise RuntimeError(
            f"{name} calls view() on a tensor whose strides do not allow it. The strides of an "
            "update are those of the gradients or those of the parameters, depending on the "
            "engine: call reshape() instead."
        ) from error


def _named(name: str, says: str, method: M) -> M:
    method.__name__, method.__doc__ = name, says
    return method


class TensorList:
    """A handle around a list of tensors, copy on write.

    Methods that end in an underscore write what they are called on, as in torch, and return it.
    When the memory is *borrowed* (a gradient, a parameter, another link's state) the first such
    call moves the handle to memory of its own, so that the lender does not change. All other
    methods make a new list, whose values stay as they are whatever is written later, and they write
    nothing. Three methods about memory differ: `own` returns the list itself, `to` returns the list
    itself if it has that dtype, and `borrow` returns a list that shares the memory until one of
    both is written. This holds in every engine.

    `u.tensors` and iterating give the tensors themselves, to be read. They have the shapes of the
    parameters. Their strides are those of the gradients or those of the parameters, depending on
    the engine: write `t.reshape(...)`, not `t.view(...)`.

    No method reads a device value on the host: a 0-dim tensor may stand wherever a number may.
    Every method that computes goes through `_new` or `_write`, under the name of an operator: that
    of `torch._foreach_<name>`, or of a row of STAND_INS in foreach.py.
    """

    __slots__ = ("__weakref__", "loans", "measure", "owned", "tensors", "workspace")

    loans: list[weakref.ref[TensorList]] | None
    """The lists that borrow the memory of this one; they and the lender share this list."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        owned: bool = False,
        workspace: Workspace = None,
        measure: Verb = None,
    ) -> None:
        self.tensors = list(tensors)
        self.owned, self.workspace, self.measure = owned, workspace, measure
        self.loans = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors."""
        return self.tensors[0].dtype

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
        raise TypeError("a TensorList has methods, no operators: u.mul(x), u.neg(), u.tensors[i]")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operator
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __getitem__ = _no_operator

    # ------------------------------------------------------------------ memory

    def borrow(self) -> TensorList:
        """Return a list with the same values, which shares the memory while nobody writes.

        A method that writes the new list, or this one, leaves the other as it was. Both see what is
        written into the tensors themselves.
        """
        if self.owned and torch.compiler.is_compiling():  # which traces no weak references
            return self.clone()
        return self._lend(TensorList(self.tensors, measure=self.measure))

    def own(self) -> TensorList:
        """Return this list, moved to memory of its own unless it has some already."""
        return self if self.owned else self._move(self.tensors, self.dtype)

    def to(self, dtype: torch.dtype) -> TensorList:
        """Return this list if it has that dtype, otherwise a new list with converted values."""
        if self.dtype == dtype:
            return self
        return TensorList(self.tensors, workspace=self.workspace)._move(self.tensors, dtype)

    def clone(self) -> TensorList:
        """A new list with the same values."""
        return TensorList(copies(self.tensors, self.dtype), owned=True, measure=self.measure)

    def copy_(self, source: TensorList) -> TensorList:
        """Take the values of `source`, keeping this list's dtype."""
        if not self.owned:
            return self._move(source.tensors, self.dtype)
        self._unshare()
        copy_into(self.tensors, source.tensors)
        return self

    def _move(self, values: Sequence[Tensor], dtype: torch.dtype) -> TensorList:
        """Move to memory of its own, with these values."""
        lasting = self._lasting(dtype)
        if lasting is None:
            return self._become(copies(values, dtype))
        copy_into(lasting, values)
        return self._become(lasting)

    def _lasting(self, dtype: torch.dtype) -> list[Tensor] | None:
        """The workspace, if there is one of this dtype, and nothing else is in it."""
        return None if self.workspace is None else self.workspace(self.tensors, dtype)

    def _become(self, tensors: Sequence[Tensor]) -> TensorList:
        self.tensors, self.owned, self.workspace = list(tensors), True, None
        self.loans = None
        return self

    def _lend(self, borrowed: L) -> L:
        """Note that a list borrows the memory of this one, or of the list that this one borrows."""
        if self.loans is None and self.owned:
            self.loans = []
        if self.loans is not None:
            self.loans.append(weakref.ref(borrowed))
            borrowed.loans = self.loans
        return borrowed

    def _unshare(self) -> None:
        """Move the lists that borrow the memory of this one, which is about to be written."""
        loans = self.loans or ()
        self.loans = None
        for loan in loans:
            borrowed = loan()
            if borrowed is not None:
                borrowed._leave()

    def _leave(self) -> None:
        """Move away from memory that its owner is about to write."""
        self.own()

    # ------------------------------------------------------------------ operators

    def _new(self, name: str, *operands: Any) -> TensorList:
        """Run an operator into a new list."""
        if name in STAND_INS:
            return self._stand_in(name, *operands)
        made = foreach(name, self.tensors, self._arguments(name, operands))
        return TensorList(made, owned=True, measure=self.measure)

    def _write(self, name: str, *operands: Any) -> TensorList:
        """Run an operator in place, or into new memory where this memory is borrowed."""
        if self.owned:
            self._unshare()
        if not self.owned and self._write_elsewhere(name, operands):
            return self
        vector = shared_memory(self.own().tensors)
        if vector is not None and vector.dim() == 1:
            args = [vector_operand(x, vector) for x in operands]
            if not any([x is None for x in args]):
                foreach(name, [vector], args, in_place=True)
                return self
        foreach(name, self.tensors, self._arguments(name, operands), in_place=True)
        return self

    def _write_elsewhere(self, name: str, operands: Sequence[Any]) -> bool:
        """Run an operator from borrowed memory straight into other memory: one pass, not two."""
        if self.workspace is not None:
            return name in OUT and self._fill(getattr(torch, name), operands)
        args = self._arguments(name, operands)
        firsts = [x[0] if isinstance(x, (list, tuple)) and x else x for x in args]
        if any([isinstance(x, Tensor) and x.dtype != self.dtype for x in firsts]):
            return False  # the dtype of 0-dim tensors would change; in place it cannot
        self._become(foreach(name, self.tensors, args))
        return True

    def _fill(self, operator: Callable[..., Any], operands: Sequence[Any]) -> bool:
        """Run an operator into the workspace, where a call for each tensor is worth a pass."""
        large = sum(map(Tensor.numel, self.tensors)) >= SMALL * len(self)
        lasting = self._lasting(self.dtype) if large else None
        if lasting is None or type(lasting[0]) is not Tensor:
            return False
        rows = [self._row(x) for x in operands]
        for source, out, *each in zip(self.tensors, lasting, *rows, strict=True):
            operator(source, *each, out=out)
        self._become(lasting)
        return True

    def _stand_in(self, name: str, *operands: Any) -> TensorList:
        """An operator that torch has no `_foreach_*` for."""
        rows = [self._row(x) for x in operands]
        out = stand_in(name, self.tensors, rows)
        return TensorList(out, owned=True, measure=self.measure)

    # ------------------------------------------------------------------ operands

    def _row(self, x: Operand) -> list[Any]:
        """An operand as one for each tensor."""
        each = operand(x.tensors if isinstance(x, TensorList) else x, self.tensors)
        return list(each) if isinstance(each, (list, tuple)) else [each] * len(self)

    def _arguments(self, name: str, operands: Sequence[Operand]) -> list[Any]:
        """Operands as torch's foreach operators take them."""
        given = [x.tensors if isinstance(x, TensorList) else x for x in operands]
        return arguments(name, self.tensors, given)

    def _promoted(self, x: TensorList) -> TensorList:
        """Return a list, in the dtype of this one if that is wider: no product is rounded then."""
        return x.to(torch.promote_types(x.dtype, self.dtype))

    # ------------------------------------------------------------------ arithmetic

    def add(self, x: Operand, alpha: float | Tensor = 1) -> TensorList:
        """A new list: self + alpha · x"""
        return self._new(*_sum(x, alpha))

    def add_(self, x: Operand, alpha: float | Tensor = 1) -> TensorList:
        """self + alpha · x"""
        return self._write(*_sum(x, alpha))

    def lerp(self, end: Operand, weight: Operand) -> TensorList:
        """A new list: self + weight · (end - self)"""
        return self._new("lerp", end, weight)

    def lerp_(self, end: Operand, weight: Operand) -> TensorList:
        """self + weight · (end - self)"""
        return self._write("lerp", end, weight)

    def addcmul_(self, a: TensorList, b: TensorList, value: float | Tensor = 1) -> TensorList:
        """self + value · a · b"""
        if isinstance(value, Tensor):
            return self._write("addcmul", self._promoted(a).mul(value), b)
        return self._write("addcmul", a, b, value)

    def clamp(self, low: Operand, high: Operand) -> TensorList:
        """A new list: low where self is below, high where it is above; NaN stays NaN"""
        return self._new("clamp_min", low).minimum_(high)

    def clamp_(self, low: Operand, high: Operand) -> TensorList:
        """low where self is below, high where it is above; NaN stays NaN"""
        if isinstance(low, (int, float)) and isinstance(high, (int, float)):
            return self._write("clamp", low, high)
        return self.maximum_(low).minimum_(high)

    mul, mul_ = _with("mul", "self · x")
    div, div_ = _with("div", "self / x")
    sub, sub_ = _with("sub", "self - x")
    maximum, maximum_ = _with("maximum", "The larger of self and x, entry by entry", "clamp_min")
    minimum, minimum_ = _with("minimum", "The smaller of self and x, entry by entry", "clamp_max")
    neg, neg_ = _both("neg", "-self")
    abs, abs_ = _both("abs", "|self|")
    sign, sign_ = _both("sign", "-1, 0 or 1, as the sign of each entry")
    sqrt, sqrt_ = _both("sqrt", "√self")
    rsqrt, rsqrt_ = _both("rsqrt", "1 / √self")
    reciprocal, reciprocal_ = _both("reciprocal", "1 / self")
    exp, exp_ = _both("exp", "e to the power of self")
    expm1, expm1_ = _both("expm1", "e to the power of self, less 1: near 0 too")
    log, log_ = _both("log", "The natural logarithm of self")
    log1p, log1p_ = _both("log1p", "The natural logarithm of 1 + self: near 0 too")
    tanh, tanh_ = _both("tanh", "The hyperbolic tangent of self")
    sigmoid, sigmoid_ = _both("sigmoid", "1 / (1 + e to the power of -self)")
    erf, erf_ = _both("erf", "The error function of self")
    sin, sin_ = _both("sin", "The sine of self")
    cos, cos_ = _both("cos", "The cosine of self")
    isfinite = _both("isfinite", "where entries are neither infinite nor NaN")[0]
    isinf = _both("isinf", "where entries are infinite")[0]
    isnan = _both("isnan", "where entries are not a number")[0]
    positive = _both("positive", "where entries are above zero")[0]

    def square(self) -> TensorList:
        """A new list: self²"""
        return self._new("mul", self)

    def square_(self) -> TensorList:
        """self²"""
        return self._write("mul", self)

    def pow(self, exponent: Operand) -> TensorList:
        """A new list: self to the power of the exponent"""
        return self._new("pow", exponent)

    def pow_(self, exponent: Operand) -> TensorList:
        """self to the power of the exponent"""
        return self._write("pow", exponent)

    def where(self, keep: Tensor | Iterable[Tensor], other: TensorList | float) -> TensorList:
        """A new list: these values where `keep` holds, or other.

        `keep` has a mask or a flag for each tensor, or is one flag for all.
        """
        if isinstance(keep, Tensor):  # one is a vector too: as a number it would be no flag
            return self._new("where", keep if keep.dim() else keep.expand(len(self)), other)
        return self._new("where", keep if isinstance(keep, TensorList) else list(keep), other)

    def hypot(self, other: TensorList) -> TensorList:
        """A new list: √(self² + other²), in range whatever the squares are."""
        return self._new("hypot", other)

    def atan2(self, other: TensorList) -> TensorList:
        """A new list: the angle of the points (other, self), in range whatever the ratio is."""
        return self._new("atan2", other)

    def eq(self, x: Operand) -> TensorList:
        """A new list: where entries equal x."""
        return self._stand_in("eq", x)  # of entries: no kernel has it

    def masked_fill_(self, masks: TensorList, value: float | Tensor) -> TensorList:
        """The value where a mask holds."""
        if self.owned:
            self._unshare()
        fill_(self.own().tensors, masks.tensors, value)
        return self

    # ------------------------------------------------------------------ all of a tensor at once

    def map(self, fn: Callable[[Tensor], Tensor]) -> TensorList:
        """A new list: `fn` of each tensor, which `fn` must not write.

        What `fn` returns is copied if it lies in the memory of the tensor, as a view does.
        """
        tensors = self.tensors
        made = [call_user("TensorList.map: fn", fn, t) for t in tensors]
        known = all_real(made) and not torch.compiler.is_compiling()
        if not known or not storages(made).isdisjoint(storages(tensors)):
            made = [t.clone() for t in made]
        return TensorList(made, owned=True, measure=self.measure)

    def stack(self) -> Tensor:
        """One vector of these 0-dim tensors, in float64 (float32 where the device has none)."""
        vector = shared_memory(self.tensors)
        dtype = wide(self.tensors[0].device)
        if vector is None:
            return torch.stack(self.tensors).to(dtype)
        return vector.to(dtype, copy=True)

    def sum(self) -> Tensor:
        """One vector: the sum of the entries of each tensor, as exact as norms are.

        Of a sharded parameter a list holds the part that is here.
        """
        real, imaginary = self.statistics(norms.NAMED["sum"]).unbind()
        return torch.complex(real, imaginary) if self.dtype.is_complex else real

    def dot(self, other: TensorList | Sequence[Tensor]) -> Tensor:
        """One vector: the inner product of each tensor with its other, as exact as norms are.

        Of complex ones its real part. `Units.dot` is the one of whole parameters and of units.
        """
        return norms.products(self.tensors, self._row(other))[0]

    def statistics(self, m: Measure) -> Tensor:
        """The statistics of a norm order: a column for each tensor."""
        return norms.statistics(self.tensors, m)

    def _row_statistics(self, rows: SliceRows, m: Measure) -> Tensor | None:
        """The statistics of slices, a column for each, where a pass of this list measures them."""
        return None


def _sum(x: Operand, alpha: float | Tensor) -> tuple[Any, ...]:
    """The operator that adds alpha · x, and its operands."""
    if isinstance(x, (int, float)):
        return "add", x * alpha
    if isinstance(alpha, Tensor):  # alpha= would read it on the host
        return "addcmul", x, alpha
    plain = type(alpha) is int and alpha == 1  # as it is where nobody gave one
    return ("add", x) if plain else ("add_scaled", x, alpha)
