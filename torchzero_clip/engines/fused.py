"""Fused: an update left to a fused optimizer of torch, at the end of a chain.

EagerSession decides what is left to it; `takes` may say no. A fused optimizer takes gradients as
they are, in the dtype of the parameters. Where they are still to be scaled, or to be converted from
half precision, that is done for a few at a time: a pass over memory is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core import norms, small_tensors
from torchzero_clip.core.engine import FusedKernel, Group, State
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.state import HALF
from torchzero_clip.core.tensor_kinds import DTYPE, SHAPE, all_plain
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.torch_private import foreach, fused
from torchzero_clip.engines import pieces
from torchzero_clip.engines.deferred import Guarded, Owed, Scaled, overlap
from torchzero_clip.engines.kept import BATCH, LARGE, Kept, Wide, updated_in_turn

LARGEST = 4 * pieces.PIECE
"""Entries for a fused optimizer behind factors alone, which need little memory."""


class Fused(pieces.Updated):
    """A deferred update of a rule that torch has a fused optimizer for."""

    __slots__ = ()

    _kernel: FusedKernel

    @property
    def at_once(self) -> bool:
        """Whether nothing is had by computing its pieces, or they cannot be told apart."""
        host = pieces.bottom(self).tensors[0].device.type in small_tensors.HOSTS
        kept = any([isinstance(held, Kept) for held in self._state.values()])
        return host or kept or not self._rule.per_entry

    def compute(self) -> list[Tensor]:
        if not self.at_once:
            return super().compute()
        self._done(self)  # to compute it may ask for the workspace that it reads
        return updated_in_turn(self._rule, self.source, self._state, self._group).own().tensors

    def piece(self, piece: pieces.Piece, keep: bool = False) -> TensorList:
        if self.at_once:
            return TensorList(piece.of(self.tensors), owned=not keep)
        return super().piece(piece, keep)

    def move(
        self, params: list[Tensor], a: Any, b: float, skip: Skip, wide: Wide | None = None
    ) -> None:
        """w ← (1 - b) w - a u, by the fused optimizer; `wide` are parameters of another dtype."""
        kernel, decays = self._kernel, bool(self._kernel.decays and b and a != 0)
        kernel.advance(self._state)
        held = [self._state.get(name, TensorList([])) for name in kernel.state]
        kept = [some for some in held if isinstance(some, Kept)]
        rest: Any = 1 - b if b and not decays else None
        function: Any = kernel.function
        options = {"lr": a, "weight_decay": b / a if decays else 0.0}
        if isinstance(function, partial):
            function, options = function.func, {**function.keywords, **options}
        if skip:
            flag = skip.on(params[0].device)
            options["found_inf"] = flag.to(torch.float32)
            if rest is not None:
                rest = torch.where(flag, torch.ones_like(flag, dtype=self.dtype), rest)
        # what changes is made before the weights move, which it may be of
        narrow = wide is None and params[0].dtype != self.dtype
        for piece, grads in self._changes(params, wide, bool(kept), options):
            some = piece.of(params)
            w = (
                small_tensors.copies(some, self.dtype)
                if narrow
                else wide.wide(piece)
                if wide
                else some
            )
            if rest is not None:
                if "grad_scale" not in options and overlap(w, grads):  # gradients lie beside them
                    grads = [grad.clone() for grad in grads]
                foreach("mul_", w, rest)
            lists = [x.wide(piece) if isinstance(x, Kept) else piece.of(stored(x)) for x in held]
            function(w, grads, *lists, **options)
            if narrow:
                foreach("copy_", some, w)
            elif wide is not None:
                wide.put(piece, w)
            for x, values in zip(held, lists, strict=True) if kept else ():
                if isinstance(x, Kept):
                    x.put(piece, values)
            del w, grads  # the next are made in their memory
        self._done(self)
        self.tensors = []  # it is used up

    def _changes(
        self, params: list[Tensor], wide: Wide | None, kept: bool, options: dict[str, Any]
    ) -> Iterator[tuple[pieces.Piece, list[Tensor]]]:
        """The pieces that the fused optimizer takes in turn, and the update of each as it takes it:
        what is computed or converted is then still in the cache. SGD scales by itself: a factor of
        float32 goes into its `options`, before it is called. So does what gradients are divided by
        that may be written: torch's kernels write them.
        """
        u, dtype, host = self.source, self.dtype, params[0].device.type in small_tensors.HOSTS
        own, narrow = getattr(self._kernel.function, "func", None), params[0].dtype != dtype
        sgd, adamw = [own is getattr(fused(name), "func", 0) for name in ("sgd", "adamw")]
        if isinstance(u, Owed) and u.waits and (sgd or adamw) and not (narrow or kept):
            options["grad_scale"] = u.ratio
            yield pieces.Piece(0, len(params)), u.held
            u.debt.clear()
            return
        if isinstance(u, pieces.InPieces) and u.pending and not (host or kept):
            most = None if pieces.computes(u) else LARGEST
            for piece in pieces.pieces(params, pieces.cut(u), most):
                yield piece, pieces.piece_of(u, piece).tensors
            return
        factor, source = (1.0, u.tensors) if isinstance(u, Owed) else _factor_and_source(u)
        plain = not (narrow or kept or source[0].dtype != dtype)
        damps = sgd and not (options.get("dampening") or options.get("nesterov"))
        damps = damps and (plain or (wide is not None and wide.form.wide and not kept))
        if damps and dtype == torch.float32 and 1e-6 < factor < 1:
            options["dampening"], factor = 1 - factor, 1.0
        if plain and factor == 1:
            yield pieces.Piece(0, len(params)), source
            return
        size, divisor = norms.halves(factor, dtype)
        number = torch.full((), size, dtype=dtype, device=source[0].device)
        most, grows = (BATCH, False) if params[0].is_cpu else (LARGE, True)
        for piece in pieces.pieces(params, True, most, grows):
            some = piece.of(source)
            if some[0].dtype != dtype:
                some = [t.to(dtype) for t in some]
            if factor != 1:
                some = foreach("mul", some, number)
            if divisor != 1:
                foreach("div_", some, divisor)
            yield piece, some


def takes(kernel: FusedKernel, given: list[Tensor] | Wide, u: TensorList, state: State) -> bool:
    """Whether the fused optimizer can be given these tensors: it trusts shapes and strides."""
    params, wide = (given.stored, given) if isinstance(given, Wide) else (given, None)
    # on a host it is computed now, where it must be
    early = params[0].device.type in small_tensors.HOSTS or isinstance(u, Owed)
    dtype, grads = u.dtype, _factor_and_source(u)[1] if early else pieces.bottom(u).tensors
    held = {name: stored(state[name]) for name in kernel.state if name in state}
    alike = [grads, *[some for name, some in held.items() if name not in kernel.numbers]]
    kept = [some for name in held if isinstance(some := state[name], Kept)]
    mine, others = [*params, *grads], [t for some in held.values() for t in some]
    every = mine + others
    others = [t for t in others if not kept or t.dtype != torch.bfloat16]
    shapes = list(map(SHAPE, params))
    return (
        kernel.function is not None
        and params[0].device.type in kernel.devices
        and dtype in (torch.float32, torch.float64)
        and {dtype, *HALF}.issuperset(map(DTYPE, mine))
        and {dtype}.issuperset(map(DTYPE, others))
        and all_plain(every)
        and all(map(Tensor.is_contiguous, every))
        and all([len(some) == len(params) for some in (grads, *held.values())])
        and all([all(map(operator.eq, map(SHAPE, some), shapes)) for some in alike])
        and all([some.cut for some in (*kept, wide) if some is not None])
    )


def numbers_only(group: Group) -> bool:
    """Whether no live value is a tensor, since kernels take numbers."""
    values = [x if isinstance(x, (tuple, list)) else (x,) for x in group.values()]
    return not any([isinstance(x, Tensor) for value in values for x in value])


def stored(held: TensorList) -> list[Tensor]:
    """The tensors of state as they are kept."""
    if isinstance(held, Kept):
        return held.stored
    return held.held if isinstance(held, Guarded) else held.tensors


def _factor_and_source(u: TensorList) -> tuple[float, list[Tensor]]:
    """A list as a number and the tensors to multiply by it."""
    if isinstance(u, Scaled) and u.pending and not (u.b or isinstance(u.a, Tensor)):
        return u.a, u.source.tensors
    return 1.0, u.held if isinstance(u, Owed) and u.waits else u.tensors
