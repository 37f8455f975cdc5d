"""TensorList: a list of tensors that has methods like one tensor, on torch's foreach operators."""

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
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.small_tensors import copies
from torchzero_clip.core.tensor_kinds import SMALL, all_real, shared_memory, storages, wide

Operand: TypeAlias = "float | Tensor | TensorList | Sequence[Tensor]"
"""An operand of a list: a number, a 0-dim tensor, a vector with an element for each tensor of the
list, a TensorList, or a list with a broadcastable tensor for each tensor."""
Workspace: TypeAlias = "Callable[[Sequence[Tensor], torch.dtype], list[Tensor] | None] | None"
"""A function that returns memory for a list to move to, or None.

The memory is kept from step to step. The arguments are the tensors of the list and the dtype of the
memory.
"""
Verb: TypeAlias = "Callable[[TensorList], Tensor] | None"
"""A function that measures a list: see `NormRule.measure`."""
Unary: TypeAlias = "Callable[[TensorList], TensorList]"
Binary: TypeAlias = "Callable[[TensorList, Operand], TensorList]"
M = TypeVar("M", bound=Callable[..., Any])
L = TypeVar("L", bound="TensorList")
R = TypeVar("R")
RETURNS = "Return a new list with {}."
WRITES = "Write {} into this list, and return it."


def _both(name: str, says: str) -> tuple[Unary, Unary]:
    """Return the methods of an operator without operands: one for a new list, one in place.

    Args:
        name: The name of the operator in torch, which is also the name of the method.
        says: A description of the result, such as "√self". Both docstrings contain it.
    """

    def new(self: TensorList) -> TensorList:
        return self._new(name)

    def write(self: TensorList) -> TensorList:
        return self._write(name)

    return _named(name, RETURNS.format(says), new), _named(f"{name}_", WRITES.format(says), write)


def _with(name: str, says: str, operator: str = "") -> tuple[Binary, Binary]:
    """Return the methods of an operator with one operand: one for a new list, one in place.

    Args:
        name: The name of the method for a new list.
        says: A description of the result, such as "self · x". Both docstrings contain it.
        operator: The name of the operator in torch, if it is not the name of the method.
    """

    def new(self: TensorList, x: Operand) -> TensorList:
        return self._new(operator or name, x)

    def write(self: TensorList, x: Operand) -> TensorList:
        return self._write(operator or name, x)

    return _named(name, RETURNS.format(says), new), _named(f"{name}_", WRITES.format(says), write)


def call_user(name: str, function: Callable[..., R], *args: Any) -> R:
    """Return function(*args) for a function of the user that receives tensors of a list.

    Args:
        name: The name of the function in errors.
    """
    try:
        return function(*args)
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        raise RuntimeError(
            f"{name} calls view() on a tensor whose strides do not allow a view: call "
            "reshape() instead"
        ) from error


def _named(name: str, docstring: str, method: M) -> M:
    """Set the name and the docstring of a method, and return it."""
    method.__name__ = name
    method.__doc__ = docstring
    return method


class TensorList:
    """A list with one tensor per parameter of a bucket. It has methods like a single tensor.

    Each method processes all tensors, with as few calls to torch as possible.

    **New lists and changes in place.** As in torch, a method whose name ends in an underscore
    changes the list and returns it. All other methods return a new list and change nothing. The
    values of a new list stay the same, whatever you change later. Three methods that manage memory
    are exceptions. `own` returns the list itself. `to` returns the list itself if the list already
    has the dtype. `borrow` returns a list that shares the memory until one of the two lists is
    changed.

    **Borrowed memory.** A list may borrow the memory of a gradient, a parameter, or the state of
    another link. The first method that changes such a list moves the list to new memory. So the
    gradient, parameter or state does not change.

    **Single tensors.** `u.tensors` and iteration give you the tensors themselves. Read them, but do
    not change them. They have the shapes of the parameters. Their strides are the strides of the
    gradients or of the parameters, depending on the engine. So write `t.reshape(...)`, not
    `t.view(...)`.

    **No synchronization.** No method reads a value of the device on the host. Wherever a method
    accepts a number, it also accepts a 0-dim tensor.

    Args:
        tensors: The tensors.
        owned: Whether the list owns the memory of the tensors. Otherwise it borrows the memory.
        workspace: A function that returns memory to which a borrowed list can move.
        measure: A function that measures lists: see `NormRule.measure`.
    """

    __slots__ = ("__weakref__", "loans", "measure", "owned", "tensors", "workspace")

    loans: list[weakref.ref[TensorList]] | None
    """The lists that borrow the memory of this list. All of these lists share this attribute."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        owned: bool = False,
        workspace: Workspace = None,
        measure: Verb = None,
    ) -> None:
        self.tensors = list(tensors)
        self.owned = owned
        self.workspace = workspace
        self.measure = measure
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
        return f"TensorList({counted(len(self), 'tensor')}, {kind})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"TensorList has no method {name!r}: to call a function on each tensor, write "
            "u.map(fn), or subclass TensorwiseTransform"
        )

    def _no_operator(self, other: object) -> Any:
        raise TypeError(
            "TensorList supports neither operators nor an index: instead of u * x or u[i], "
            "write u.mul(x) or u.tensors[i]"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operator
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __getitem__ = _no_operator

    # ------------------------------------------------------------------ memory

    def borrow(self) -> TensorList:
        """Return a list with the same values. Both lists share memory until one is changed.

        A method that changes one of the two lists does not change the other list. If you write into
        the tensors themselves, both lists change.
        """
        if self.owned and torch.compiler.is_compiling():  # it cannot trace weak references
            return self.clone()
        return self._lend(TensorList(self.tensors, measure=self.measure))

    def own(self) -> TensorList:
        """Move this list to new memory if it borrows memory, and return this list."""
        return self if self.owned else self._move(self.tensors, self.dtype)

    def to(self, dtype: torch.dtype) -> TensorList:
        """Return this list if it has this dtype, otherwise a new list with converted values."""
        if self.dtype == dtype:
            return self
        return TensorList(self.tensors, workspace=self.workspace)._move(self.tensors, dtype)

    def clone(self) -> TensorList:
        """Return a new list with the same values, in new memory."""
        return TensorList(copies(self.tensors, self.dtype), owned=True, measure=self.measure)

    def copy_(self, source: TensorList) -> TensorList:
        """Copy the values of `source` into this list in the dtype of this list, and return it."""
        if not self.owned:
            return self._move(source.tensors, self.dtype)
        self._unshare()
        copy_into(self.tensors, source.tensors)
        return self

    def _move(self, values: Sequence[Tensor], dtype: torch.dtype) -> TensorList:
        """Move this list to new memory, with these values, and return this list."""
        lasting = self._lasting(dtype)
        if lasting is None:
            return self._become(copies(values, dtype))
        copy_into(lasting, values)
        return self._become(lasting)

    def _lasting(self, dtype: torch.dtype) -> list[Tensor] | None:
        """Return the memory of the workspace, or None if no workspace exists or is free."""
        return None if self.workspace is None else self.workspace(self.tensors, dtype)

    def _become(self, tensors: Sequence[Tensor]) -> TensorList:
        """Replace the tensors of this list by tensors that it owns, and return this list."""
        self.tensors = list(tensors)
        self.owned = True
        self.workspace = None
        self.loans = None
        return self

    def _lend(self, borrowed: L) -> L:
        """Register a list that borrows the memory of this list or of its owner, and return it."""
        if self.loans is None and self.owned:
            self.loans = []
        if self.loans is not None:
            self.loans.append(weakref.ref(borrowed))
            borrowed.loans = self.loans
        return borrowed

    def _unshare(self) -> None:
        """Move the borrowers of this list's memory, because this memory is about to be written."""
        loans = self.loans or ()
        self.loans = None
        for loan in loans:
            borrowed = loan()
            if borrowed is not None:
                borrowed._leave()

    def _leave(self) -> None:
        """Move this list to other memory, because the owner of its memory is about to write."""
        self.own()

    # ------------------------------------------------------------------ operators

    # All methods that compute call `_new` or `_write`, which the lists of compiled steps override.
    # The name is the name of a `torch._foreach_*` operator, or a key of STAND_INS.

    def _new(self, name: str, *operands: Any) -> TensorList:
        """Run an operator, and return its result as a new list."""
        if name in STAND_INS:
            return self._stand_in(name, *operands)
        results = foreach(name, self.tensors, self._arguments(name, operands))
        return TensorList(results, owned=True, measure=self.measure)

    def _write(self, name: str, *operands: Any) -> TensorList:
        """Run an operator in place, or into new memory if this memory is borrowed."""
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
        """Run an operator that reads borrowed memory and writes other memory, in one pass.

        Returns:
            Whether the operator has run. Otherwise the list must move to other memory first.
        """
        if self.workspace is not None:
            return name in OUT and self._fill(getattr(torch, name), operands)
        args = self._arguments(name, operands)
        firsts = [x[0] if isinstance(x, (list, tuple)) and x else x for x in args]
        if any([isinstance(x, Tensor) and x.dtype != self.dtype for x in firsts]):
            return False  # a new tensor could have another dtype, but in place the dtype must stay
        self._become(foreach(name, self.tensors, args))
        return True

    def _fill(self, operator: Callable[..., Any], operands: Sequence[Any]) -> bool:
        """Run an operator that writes the workspace, with a call per tensor, if tensors are large.

        Returns:
            Whether the operator has run.
        """
        large = sum(map(Tensor.numel, self.tensors)) >= SMALL * len(self)
        lasting = self._lasting(self.dtype) if large else None
        if lasting is None or type(lasting[0]) is not Tensor:
            return False
        rows = [self._row(x) for x in operands]
        for source, target, *args in zip(self.tensors, lasting, *rows, strict=True):
            operator(source, *args, out=target)
        self._become(lasting)
        return True

    def _stand_in(self, name: str, *operands: Any) -> TensorList:
        """Run an operator of `STAND_INS`, and return its result as a new list."""
        rows = [self._row(x) for x in operands]
        results = stand_in(name, self.tensors, rows)
        return TensorList(results, owned=True, measure=self.measure)

    # ------------------------------------------------------------------ operands

    def _row(self, x: Operand) -> list[Any]:
        """Convert an operand to a list with an operand for each tensor."""
        converted = operand(x.tensors if isinstance(x, TensorList) else x, self.tensors)
        return list(converted) if isinstance(converted, (list, tuple)) else [converted] * len(self)

    def _arguments(self, name: str, operands: Sequence[Operand]) -> list[Any]:
        """Convert operands for a foreach operator of torch."""
        values = [x.tensors if isinstance(x, TensorList) else x for x in operands]
        return arguments(name, self.tensors, values)

    def _promoted(self, x: TensorList) -> TensorList:
        """Convert a list to the dtype of this list if this dtype is wider, for exact products."""
        return x.to(torch.promote_types(x.dtype, self.dtype))

    # ------------------------------------------------------------------ arithmetic

    def add(self, x: Operand, alpha: float | Tensor = 1) -> TensorList:
        """Return a new list with self + alpha · x."""
        return self._new(*_sum(x, alpha))

    def add_(self, x: Operand, alpha: float | Tensor = 1) -> TensorList:
        """Write self + alpha · x into this list, and return it."""
        return self._write(*_sum(x, alpha))

    def lerp(self, end: Operand, weight: Operand) -> TensorList:
        """Return a new list with self + weight · (end - self)."""
        return self._new("lerp", end, weight)

    def lerp_(self, end: Operand, weight: Operand) -> TensorList:
        """Write self + weight · (end - self) into this list, and return it."""
        return self._write("lerp", end, weight)

    def addcmul_(self, a: TensorList, b: TensorList, value: float | Tensor = 1) -> TensorList:
        """Write self + value · a · b into this list, and return it."""
        if isinstance(value, Tensor):
            return self._write("addcmul", self._promoted(a).mul(value), b)
        return self._write("addcmul", a, b, value)

    def clamp(self, low: Operand, high: Operand) -> TensorList:
        """Return a new list with self, limited to the range from low to high. NaN stays NaN."""
        return self._new("clamp_min", low).minimum_(high)

    def clamp_(self, low: Operand, high: Operand) -> TensorList:
        """Limit this list to the range from low to high, and return it. NaN stays NaN."""
        if isinstance(low, (int, float)) and isinstance(high, (int, float)):
            return self._write("clamp", low, high)
        return self.maximum_(low).minimum_(high)

    mul, mul_ = _with("mul", "self · x")
    div, div_ = _with("div", "self / x")
    sub, sub_ = _with("sub", "self - x")
    maximum, maximum_ = _with("maximum", "the larger of self and x for each element", "clamp_min")
    minimum, minimum_ = _with("minimum", "the smaller of self and x for each element", "clamp_max")
    pow, pow_ = _with("pow", "self to the power of x")
    hypot = _with("hypot", "√(self² + x²), without overflow of the squares")[0]
    atan2 = _with("atan2", "the angles of the points (x, self), in radians")[0]
    neg, neg_ = _both("neg", "-self")
    abs, abs_ = _both("abs", "|self|")
    sign, sign_ = _both("sign", "the sign of each element: -1, 0 or 1, and 0 for NaN")
    sqrt, sqrt_ = _both("sqrt", "√self")
    rsqrt, rsqrt_ = _both("rsqrt", "1 / √self")
    reciprocal, reciprocal_ = _both("reciprocal", "1 / self")
    exp, exp_ = _both("exp", "e to the power of self")
    expm1, expm1_ = _both("expm1", "e to the power of self, minus 1, accurate near 0")
    log, log_ = _both("log", "the natural logarithm of self")
    log1p, log1p_ = _both("log1p", "the natural logarithm of 1 + self, accurate near 0")
    tanh, tanh_ = _both("tanh", "the hyperbolic tangent of self")
    sigmoid, sigmoid_ = _both("sigmoid", "1 / (1 + e to the power of -self)")
    erf, erf_ = _both("erf", "the error function of self")
    sin, sin_ = _both("sin", "the sine of self")
    cos, cos_ = _both("cos", "the cosine of self")
    isfinite = _both("isfinite", "masks of the elements that are neither infinite nor NaN")[0]
    isinf = _both("isinf", "masks of the elements that are infinite")[0]
    isnan = _both("isnan", "masks of the elements that are NaN")[0]
    positive = _both("positive", "masks of the elements that are above zero")[0]

    def square(self) -> TensorList:
        """Return a new list with self²."""
        return self._new("mul", self)

    def square_(self) -> TensorList:
        """Write self² into this list, and return it."""
        return self._write("mul", self)

    def where(self, keep: Tensor | Iterable[Tensor], other: TensorList | float) -> TensorList:
        """Return a new list: elements of self if `keep` is set, otherwise elements of `other`.

        Args:
            keep: A list with a mask or flag for each tensor, a vector with a flag for each tensor,
                or one flag for all tensors.
            other: The other elements.
        """
        if isinstance(
            keep, Tensor
        ):  # a single flag becomes a vector, which is not read on the host
            return self._new("where", keep if keep.dim() else keep.expand(len(self)), other)
        return self._new("where", keep if isinstance(keep, TensorList) else list(keep), other)

    def eq(self, x: Operand) -> TensorList:
        """Return a new list with masks of the elements that are equal to x."""
        return self._stand_in("eq", x)  # compiled kernels have no such operator

    def masked_fill_(self, masks: TensorList, value: float | Tensor) -> TensorList:
        """Write `value` into the elements of this list whose mask is set, and return the list."""
        if self.owned:
            self._unshare()
        fill_(self.own().tensors, masks.tensors, value)
        return self

    # ------------------------------------------------------------------ all of a tensor at once

    def map(self, fn: Callable[[Tensor], Tensor]) -> TensorList:
        """Return a new list with fn(t) for each tensor t.

        `fn` must not change the tensor. If `fn` returns a view of the tensor, the view is copied.
        """
        tensors = self.tensors
        results = [call_user("TensorList.map: fn", fn, t) for t in tensors]
        known = all_real(results) and not torch.compiler.is_compiling()
        if not known or not storages(results).isdisjoint(storages(tensors)):
            results = [t.clone() for t in results]
        return TensorList(results, owned=True, measure=self.measure)

    def stack(self) -> Tensor:
        """Return a vector with the values of a list of 0-dim tensors.

        Its dtype is float64, or float32 if the device has no float64.
        """
        vector = shared_memory(self.tensors)
        dtype = wide(self.tensors[0].device)
        if vector is None:
            return torch.stack(self.tensors).to(dtype)
        return vector.to(dtype, copy=True)

    def sum(self) -> Tensor:
        """Return a vector with the sum of the elements of each tensor, as accurate as norms.

        If a parameter is sharded, its sum covers the shard of this rank.
        """
        real, imaginary = self.statistics(norms.NAMED["sum"]).unbind()
        return torch.complex(real, imaginary) if self.dtype.is_complex else real

    def dot(self, other: TensorList | Sequence[Tensor]) -> Tensor:
        """Return a vector with the inner product of each pair of tensors, as accurate as norms.

        For complex tensors, the result is the real part. If a parameter is sharded, its product
        covers the shard of this rank. `Units.dot` covers whole parameters and units.
        """
        return norms.products(self.tensors, self._row(other))[0]

    def statistics(self, m: Measure) -> Tensor:
        """Return the statistics of the tensors for a norm order, as a column for each tensor."""
        return norms.statistics(self.tensors, m)

    def _row_statistics(self, rows: SliceRows, m: Measure) -> Tensor | None:
        """Return the statistics of slices, as a column for each slice.

        The result is None if this list has no faster way to compute them.
        """
        return None


def _sum(x: Operand, alpha: float | Tensor) -> tuple[Any, ...]:
    """Return the name of the operator that adds alpha · x, and its operands."""
    if isinstance(x, (int, float)):
        return "add", x * alpha
    if isinstance(alpha, Tensor):  # alpha= would read it on the host
        return "addcmul", x, alpha
    if type(alpha) is int and alpha == 1:  # the default
        return "add", x
    return "add_scaled", x, alpha
