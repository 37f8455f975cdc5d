"""Fused: an update left to a fused optimizer of torch, at the end of a chain.

EagerSession decides what is left to it; `takes` may say no. A fused optimizer takes gradients as
they are, in the dtype of the parameters. Where they are still to be scaled, or to be converted from
half precision, that is done for a few at a time, so that they are still in the cache: a pass over
memory is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, packs
from torchzero_clip.core.engine import FusedKernel, State
from torchzero_clip.core.private import foreach
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.state import HALF
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.tensors import DTYPE, SHAPE, all_plain
from torchzero_clip.engines.deferred import Guarded, Scaled, overlap
from torchzero_clip.engines.kept import LARGE, Kept, batches, updated_in_turn
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


class Fused(Updated):
    """A deferred update of a rule that torch has a fused optimizer for."""

    __slots__ = ()

    _kernel: FusedKernel

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
            given = params, grads, stored_lists, kept, factor, self.dtype
            for w, *others in _prepared(*given):
                if rest is not None:
                    foreach("mul_", w, rest)
                function(w, *others, **options)
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


def _factor_and_source(u: TensorList) -> tuple[float, list[Tensor]]:
    """A list as a number and the tensors to multiply by it."""
    if isinstance(u, Scaled) and u.pending and not (u.b or isinstance(u.a, Tensor)):
        return u.a, u.source.tensors
    return 1.0, u.tensors


def _products(tensors: list[Tensor], factor: float, dtype: torch.dtype) -> list[Tensor]:
    """New tensors, those given times a number of any size."""
    rest, divisor = norms.halves(factor, dtype)
    number = torch.full((), rest, dtype=dtype, device=tensors[0].device)
    made = list(foreach("mul", tensors, number))
    if divisor != 1:
        foreach("div_", made, divisor)
    return made


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
