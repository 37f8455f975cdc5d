"""Gradients: those of a step, in memory that lists can read and write."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.sharding.layout import aligned_grads
from torchzero_clip.core.tensor_kinds import DEVICE, DTYPE, LAYOUT, addresses, all_plain, extent

BYTES = operator.attrgetter("nbytes")
Where: TypeAlias = "str | Callable[[Tensor], Tensor | None]"
"""The name of the attribute that has the gradients of parameters, or a function that gives them."""
Spans: TypeAlias = "tuple[list[int], list[int]]"
"""The addresses at which tensors begin, and at which they end."""


class GradPlace:
    """The place of the gradients of parameters.

    Args:
        given: The name of their attribute, or a function that gives that of a parameter. Where it
            is None or missing, `.grad` counts.
    """

    def __init__(self, given: Where = "grad") -> None:
        if not (callable(given) or (isinstance(given, str) and given.isidentifier())):
            raise TypeError(
                "grad must be the name of an attribute of parameters, such as 'main_grad', or a "
                f"function that returns the gradient of a parameter, got {given!r}"
            )
        self.given, self.usual = given, given == "grad"

    def own(self, p: Tensor) -> Tensor | None:
        """The gradient of a parameter that is not in `.grad`."""
        if callable(self.given):
            return self.given(p)
        return None if self.usual else getattr(p, self.given, None)

    def of(self, p: Tensor) -> Tensor | None:
        """The gradient of a parameter."""
        found = None if self.usual else self.own(p)
        return p.grad if found is None else found

    def put(self, p: Tensor, grad: Tensor) -> None:
        """Have another tensor be the gradient of a parameter."""
        if self.own(p) is None:
            p.grad = grad
        elif isinstance(self.given, str):
            setattr(p, self.given, grad)
        else:
            raise RuntimeError(
                f"{self.given!r} returned a gradient that a rule cannot change in place: return a "
                "gradient that has its own memory, and whose elements do not overlap"
            )

    def drop(self, p: Tensor) -> None:
        """Let go of a gradient: None in `.grad`, and zeros elsewhere, where the memory stays."""
        p.grad = None
        self.zero([p])

    def zero(self, params: Iterable[Tensor]) -> None:
        """Fill gradients that are not in `.grad` with zeros."""
        for found in () if self.usual else map(self.own, params):
            if found is not None:
                found.detach().zero_()


USUAL = GradPlace()


class StepGradients:
    """The gradients of a step, which are read as they were when it began.

    Copied are those that torch negates or conjugates when they are read, those of which several
    entries lie in one place, and those in the memory of a parameter that moves. They stay as they
    are, unless a link is going to write them: then the copy is the gradient from there on.
    """

    def __init__(self, place: GradPlace = USUAL) -> None:
        self._place = place
        self._copies: dict[Tensor, Tensor] = {}
        self.shared = False  # whether some share memory, and must be worked on in turn

    def of(self, rows: Sequence[Sequence[Tensor]], moves: bool) -> list[list[Tensor | None]]:
        """The gradients of rows of parameters, all that the step `moves` where it does."""
        found = [aligned_grads(params, self._place) for params in rows]
        pairs = [x for some in zip(rows, found, strict=True) for x in zip(*some, strict=True)]
        params = [p for p, grad in pairs if grad is not None]
        grads: list[Tensor] = [grad for row in found for grad in row if grad is not None]
        whole = not torch.compiler.is_compiling() and all_plain([*params, *grads])
        if not (whole and {torch.strided}.issuperset(map(LAYOUT, grads))):  # sparse are refused
            return found
        made: dict[int, Tensor] = {}  # what two parameters share they share as a copy
        inside: list[int] = []
        if _shared(_spans([*grads, *params] if moves else grads)):  # which is rare
            spans = _spans(grads)
            self.shared = _shared(spans)
            inside = _inside(spans, params) if moves else []
        for i in {*odd(grads), *inside}:
            if params[i] not in self._copies:
                plain = grads[i].resolve_conj().resolve_neg()
                copy = plain.clone(memory_format=torch.contiguous_format)
                self._copies[params[i]] = made.setdefault(id(grads[i]), copy)
        if self._copies:
            found = [list(map(self._copies.get, *x)) for x in zip(rows, found, strict=True)]
        return found

    def write(self, params: Iterable[Tensor]) -> None:
        """Have copies be the gradients, since they are about to be written."""
        for p in params if self._copies else ():
            if p in self._copies:
                self._place.put(p, self._copies.pop(p))


def odd(grads: Sequence[Tensor]) -> list[int]:
    """The places of tensors whose numbers are no memory of their own, as they stand there."""
    turned = any(map(Tensor.is_neg, grads)) or any(map(Tensor.is_conj, grads))
    if not turned and all(map(Tensor.is_contiguous, grads)):
        return []
    return [i for i, t in enumerate(grads) if t.is_neg() or t.is_conj() or _overlaps_itself(t)]


def plain(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether gradients are whole tensors of one dtype on one device, in memory of their own."""
    if torch.compiler.is_compiling() or not grads or not all_plain([*params, *grads]):
        return False
    facts = [set(map(fact, grads)) for fact in (DTYPE, DEVICE, LAYOUT)]
    alike = list(map(len, facts)) == [1, 1, 1] and facts[2] == {torch.strided}
    return alike and not (odd(grads) or _shared(_spans(grads)))


def _shared(spans: Spans) -> bool:
    """Whether a tensor begins before another one ends, in memory.

    Where none does, they begin and end in one order.
    """
    starts, ends = map(sorted, spans)
    return not all(map(operator.le, ends, starts[1:]))


def _inside(spans: Spans, params: Sequence[Tensor]) -> list[int]:
    """The places of gradients that lie, as a whole or in part, in the memory of parameters."""
    rows = sorted(zip(*_spans(params), strict=True))
    starts = list(map(operator.itemgetter(0), rows))
    ends = list(itertools.accumulate([end for _, end in rows], max, initial=0))
    pairs = enumerate(zip(*spans, strict=True))
    return [i for i, (start, end) in pairs if start < ends[bisect_left(starts, end)]]


def _spans(tensors: Sequence[Tensor]) -> Spans:
    """The addresses at which tensors begin and end; both are 0 for those without memory."""
    starts = addresses(tensors) or [0] * len(tensors)
    whole = all(map(Tensor.is_contiguous, tensors))
    sizes = map(BYTES, tensors) if whole else [extent(t) * t.element_size() for t in tensors]
    ends = list(map(operator.add, starts, sizes))
    return starts, [start and end for start, end in zip(starts, ends, strict=True)]


def _overlaps_itself(t: Tensor) -> bool:
    """Whether entries may lie in one place: a step is no longer than what it steps over."""
    room = 1
    for step, n in sorted([(s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1]):
        if step < room:
            return t.numel() > 0
        room += (n - 1) * step
    return False
