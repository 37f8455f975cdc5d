"""Deferred lists: Scaled, a · u + b · w, and Fused, an update left to a fused optimizer of torch.

EagerSession decides what becomes one; `takes` may say no. A fused optimizer takes gradients as they
are, in the dtype of the parameters. Where they are still to be scaled, or to be converted from half
precision, that is done for a few at a time, so that they are still in the cache: a pass over memory
is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, packs
from torchzero_clip.core.engine import FusedKernel, Group, Rule, State
from torchzero_clip.core.foreach import copy_into
from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure
from torchzero_clip.core.private import foreach
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.state import HALF
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import DTYPE, SHAPE, all_plain, storages
from torchzero_clip.engines.kept import BATCH, LARGE, Kept, batches, updated_in_turn
from torchzero_clip.engines.parts import (
    PART,
    Parted,
    Piece,
    Updated,
    bottom,
    computes,
    cut,
    piece_of,
    pieces,
)

LARGEST = 4 * PART  # entries for a fused optimizer behind factors alone, which need little memory


class Scaled(Parted):
    """a · source + b · parameters, in a dtype.

    Args:
        source: A list whose memory stays as it is until the step ends.
        a: A number, or a 0-dim tensor.
        b: A number.
        params: The parameters.
        dtype: The dtype of the result.
        movable: The list of these tensors that moves to a workspace when it is written.
    """

    __slots__ = ("_dtype", "_movable", "_params", "a", "b")

    def __init__(
        self,
        source: TensorList,
        a: Any,
        b: float,
        params: TensorList,
        dtype: torch.dtype,
        movable: Callable[[TensorList], TensorList],
    ) -> None:
        super().__init__(source)
        self.a, self.b, self._params = a, b, params
        self._dtype, self._movable = dtype, movable

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def times(self, a: Any, b: float = 0.0) -> Scaled:
        """a · self + b · parameters."""
        if self.pending and not isinstance(self.a, Tensor):
            b = a * self.b + b if self.b else b
            return Scaled(self.source, a * self.a, b, self._params, self._dtype, self._movable)
        return Scaled(self, a, b, self._params, self._dtype, self._movable)

    def statistics(self, m: Measure) -> Tensor:
        alone = type(self.a) is float and (self.a, self.b) == (1, 0)
        return self.source.statistics(m) if self.pending and alone else super().statistics(m)

    def apart(self) -> tuple[TensorList, float, float]:
        """A list and two numbers, from which this one is a · list + b · parameters."""
        return (self, 1.0, 0.0) if isinstance(self.a, Tensor) else (self.source, self.a, self.b)

    @property
    def cut(self) -> bool:
        return all(map(Tensor.is_contiguous, self._params.tensors))

    def compute(self) -> list[Tensor]:
        source = self.source
        u = source if source.owned else self._movable(TensorList(source.tensors))
        return self._of(u, self._params).own().tensors

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        params = TensorList(piece.of(self._params.tensors))
        return self._of(piece_of(self.source, piece, keep), params)

    def _of(self, u: TensorList, params: TensorList) -> TensorList:
        u = u.to(self._dtype)
        if isinstance(self.a, Tensor):
            u = u.mul_(self.a)
        elif type(self.a) is not float or self.a != 1:
            u = times(u, self.a)
        return u.add_(params, alpha=self.b) if self.b else u


class Guarded(Lazy):
    """State of a step that may be skipped: what reads or writes it has it made safe first.

    Args:
        held: The tensors, for a fused optimizer that looks at the flag by itself.
        guard: Called before anybody else sees them.
    """

    __slots__ = ("_guard", "held")

    def __init__(self, held: Sequence[Tensor], guard: Callable[[], None]) -> None:
        super().__init__()
        self.held, self._guard = list(held), guard

    def __len__(self) -> int:
        return len(self.held)

    @property
    def dtype(self) -> torch.dtype:
        return self.held[0].dtype

    def compute(self) -> list[Tensor]:
        self._guard()
        return self.held


class Fused(Updated):
    """A deferred update of a rule that torch has a fused optimizer for."""

    __slots__ = ("_kernel",)

    def __init__(
        self,
        source: TensorList,
        rule: Rule,
        state: State,
        group: Group,
        done: Callable[[Updated], Any],
        kernel: FusedKernel,
    ) -> None:
        super().__init__(source, rule, state, group, done)
        self._kernel = kernel

    @property
    def at_once(self) -> bool:
        """Whether nothing is had by computing its pieces, or they cannot be told apart."""
        host = bottom(self).tensors[0].device.type in packs.HOSTS
        kept = any([isinstance(held, Kept) for held in self._state.values()])
        return host or kept or not self._rule.per_entry

    def compute(self) -> list[Tensor]:
        if not self.at_once:
            return super().compute()
        self._done(self)  # to compute it may ask for the workspace that it reads
        return updated_in_turn(self._rule, self.source, self._state, self._group).own().tensors

    def piece(self, piece: Piece, keep: bool = False) -> TensorList:
        if self.at_once:
            return TensorList(piece.of(self.tensors), owned=not keep)
        return super().piece(piece, keep)

    def move(self, params: list[Tensor], a: Any, b: float, skip: Skip) -> None:
        """w ← (1 - b) w - a u, by the fused optimizer."""
        kernel, decays = self._kernel, bool(self._kernel.decays and b and a != 0)
        shrinks = b and not decays
        kernel.advance(self._state)
        lists = [self._state.get(n, TensorList([])) for n in kernel.state]
        rest: Any = 1 - b if shrinks else None
        function: Any = kernel.function
        options = {"lr": a, "weight_decay": b / a if decays else 0.0}
        if isinstance(function, partial):
            function, options = function.func, {**function.keywords, **options}
        if skip:
            flag = skip.on(params[0].device)
            options["found_inf"] = flag.to(torch.float32)
            if shrinks:
                rest = torch.where(flag, torch.ones_like(flag, dtype=self.dtype), rest)
        kept = [some if isinstance(some, Kept) else None for some in lists]
        stored_lists = list(map(stored, lists))
        u = self.source
        host = params[0].device.type in packs.HOSTS
        if isinstance(u, Parted) and u.pending and not (host or any(kept)):
            most = None if computes(u) else LARGEST
            for piece in pieces(params, cut(u), most):
                grads = piece_of(u, piece).tensors  # before the weights move, which they may be of
                if rest is not None:
                    foreach("mul_", piece.of(params), rest)
                some = [piece.of(x) for x in stored_lists]
                function(piece.of(params), grads, *some, **options)
                del grads
        else:
            factor, grads = _factor_and_source(u)
            if shrinks and overlap(params, grads):
                grads = [grad.clone() for grad in grads]
            fused_(params, grads, stored_lists, kept, factor, rest, function, self.dtype, **options)
        self._done(self)
        self.tensors = []  # it is used up


def takes(kernel: FusedKernel, params: list[Tensor], u: TensorList, state: State) -> bool:
    """Whether the fused optimizer can be given these tensors: it trusts shapes and strides."""
    host = params[0].device.type in packs.HOSTS  # there it is computed now, where it must be
    dtype, grads = u.dtype, _factor_and_source(u)[1] if host else bottom(u).tensors
    held = {name: stored(state[name]) for name in kernel.state if name in state}
    alike = [grads, *[some for name, some in held.items() if name not in kernel.numbers]]
    kept = [some for name in held if isinstance(some := state[name], Kept)]
    mine, others = [*params, *grads], [t for some in held.values() for t in some]
    every = mine + others
    others = [t for t in others if not kept or t.dtype != torch.bfloat16]
    kinds = {dtype, *HALF} if params[0].is_cpu else {dtype}
    shapes = list(map(SHAPE, params))
    return (
        kernel.function is not None
        and params[0].device.type in kernel.devices
        and dtype in (torch.float32, torch.float64)
        and kinds.issuperset(map(DTYPE, mine))
        and {dtype}.issuperset(map(DTYPE, others))
        and all_plain(every)
        and all(map(Tensor.is_contiguous, every))
        and all([len(some) == len(params) for some in (grads, *held.values())])
        and all([all(map(operator.eq, map(SHAPE, some), shapes)) for some in alike])
        and all([some.in_order(some.stored) for some in kept])
    )


def stored(held: TensorList) -> list[Tensor]:
    """The tensors of state as they are kept."""
    if isinstance(held, Kept):
        return held.stored
    return held.held if isinstance(held, Guarded) else held.tensors


def overlap(params: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether the values to subtract lie in the memory of the parameters."""
    if not all_plain(params):
        return False
    return not storages(params).isdisjoint(storages(values))


def _factor_and_source(u: TensorList) -> tuple[float, list[Tensor]]:
    """A list as a number and the tensors to multiply by it."""
    if isinstance(u, Scaled) and u.pending and not (u.b or isinstance(u.a, Tensor)):
        return u.a, u.source.tensors
    return 1.0, u.tensors


# ---------------------------------------------------------------------- numbers of any size


def times(u: TensorList, factor: float) -> TensorList:
    """The list times a number, which may be larger or smaller than the dtype holds well."""
    rest, divisor = norms.halves(factor, u.dtype)
    u = u.mul_(rest)
    return u if divisor == 1 else u.div_(divisor)


def _products(tensors: list[Tensor], factor: float, dtype: torch.dtype) -> list[Tensor]:
    """New tensors, those given times a number of any size."""
    rest, divisor = norms.halves(factor, dtype)
    number = torch.full((), rest, dtype=dtype, device=tensors[0].device)
    made = list(foreach("mul", tensors, number))
    if divisor != 1:
        foreach("div_", made, divisor)
    return made


def subtract_(
    params: list[Tensor], values: Sequence[Tensor], factor: float, in_parts: bool
) -> None:
    """w ← w - factor · u; half precision in parts, since torch makes float32 copies of both."""
    rest, divisor = norms.halves(factor, params[0].dtype)
    if divisor != 1:
        values = foreach("div", [u.to(params[0].dtype) for u in values], divisor)
    if params[0].dtype == values[0].dtype:
        foreach("sub_", params, list(values), alpha=rest)
        return
    if not in_parts:  # off the fast route of torch
        wide = packs.copies(params, values[0].dtype)
        foreach("sub_", wide, list(values), alpha=rest)
        copy_into(params, wide)
        return
    for p, u in zip(params, values, strict=True):
        if p.numel() > BATCH and p.is_contiguous() and u.is_contiguous():
            for some, change in zip(p.view(-1).split(BATCH), u.view(-1).split(BATCH), strict=True):
                some.sub_(change, alpha=rest)
        else:
            p.sub_(u, alpha=rest)


# ---------------------------------------------------------------------- a few at a time


def fused_(
    params: list[Tensor],
    grads: list[Tensor],
    state: list[list[Tensor]],
    kept: list[Kept | None],
    factor: float,
    rest: Any,
    function: Callable[..., Any],
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """Call a fused optimizer with gradients times a factor, once the parameters have shrunk."""
    for w, *others in _prepared(params, grads, state, kept, factor, dtype):
        if rest is not None:
            foreach("mul_", w, rest)
        function(w, *others, **options)


def _prepared(
    params: list[Tensor],
    grads: list[Tensor],
    state: list[list[Tensor]],
    kept: list[Kept | None],
    factor: float,
    dtype: torch.dtype,
) -> Iterator[list[list[Tensor]]]:
    """Parameters, gradients and state as a fused optimizer takes them: scaled, in one dtype."""
    lists = [params, grads, *state]
    narrow = [some[0].dtype != dtype for some in lists[:2]]
    widens = kept.count(None) < len(kept)
    if factor == 1 and not (any(narrow) or widens):
        yield lists
        return
    for where, (some, changes, *held) in batches(lists, LARGE if widens else None):
        u = [grad.to(dtype) for grad in changes] if narrow[1] else changes
        u = u if factor == 1 else _products(u, factor, dtype)
        w = [p.to(dtype) for p in some] if narrow[0] else some
        rows = list(zip(kept, held, strict=True))
        wide = [row if k is None else [t.float() for t in row] for k, row in rows]
        yield [w, u, *wide]
        if narrow[0]:
            foreach("copy_", some, w)
        for (k, row), values in zip(rows, wide, strict=True):
            if k is not None:
                for (i, at), target, x in zip(where, row, values, strict=True):
                    k.rounding.store(i, target.view(-1), x.view(-1), at)
