"""The gradients of a step, in memory that lists can read and write."""

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
"""The name of the parameters' attribute with the gradient, or a function that returns it."""
Spans: TypeAlias = "tuple[list[int], list[int]]"
"""The addresses in memory at which tensors begin, and the addresses at which they end."""


class GradPlace:
    """The place where the gradients of parameters are stored.

    Args:
        given: The name of an attribute of parameters, or a function that returns the gradient of a
            parameter. If the result is None, or the attribute is missing, `.grad` is used.
    """

    def __init__(self, given: Where = "grad") -> None:
        if not (callable(given) or (isinstance(given, str) and given.isidentifier())):
            raise TypeError(
                "grad must be the name of an attribute of the parameters, such as 'main_grad', or "
                f"a function that returns the gradient of a parameter, got {given!r}"
            )
        self.given = given
        self.usual = given == "grad"

    def own(self, p: Tensor) -> Tensor | None:
        """Return the gradient of a parameter if it is not stored in `.grad`."""
        if callable(self.given):
            return self.given(p)
        return None if self.usual else getattr(p, self.given, None)

    def of(self, p: Tensor) -> Tensor | None:
        """Return the gradient of a parameter."""
        own = None if self.usual else self.own(p)
        return p.grad if own is None else own

    def put(self, p: Tensor, grad: Tensor) -> None:
        """Store another tensor as the gradient of a parameter."""
        if self.own(p) is None:
            p.grad = grad
        elif isinstance(self.given, str):
            setattr(p, self.given, grad)
        else:
            raise RuntimeError(
                f"grad={self.given!r} returned a gradient that cannot be changed in place: "
                "return a tensor whose elements do not share memory with each other or with "
                "another tensor"
            )

    def drop(self, p: Tensor) -> None:
        """Drop the gradient of a parameter.

        `.grad` becomes None. If a gradient is stored elsewhere, its memory is kept and filled with
        zeros.
        """
        p.grad = None
        self.zero([p])

    def zero(self, params: Iterable[Tensor]) -> None:
        """Fill gradients that are not stored in `.grad` with zeros."""
        if self.usual:
            return
        for p in params:
            grad = self.own(p)
            if grad is not None:
                grad.detach().zero_()


USUAL = GradPlace()
"""The usual place of gradients: `.grad`."""


class StepGradients:
    """The gradients of a step, with the values that they had when the step began.

    Some gradients are copied:

    - Gradients that torch negates or conjugates when they are read.
    - Gradients with several elements at one address, such as expanded tensors.
    - Gradients in the memory of a parameter that the step changes.

    The gradients themselves do not change. If a link is about to write gradients, the copies
    replace the gradients.
    """

    def __init__(self, place: GradPlace = USUAL) -> None:
        self._place = place
        self._copies: dict[Tensor, Tensor] = {}
        self.shared = False  # whether gradients share memory, so that links must run in turn

    def of(self, rows: Sequence[Sequence[Tensor]], moves: bool) -> list[list[Tensor | None]]:
        """Return the gradients of lists of parameters, or copies of gradients.

        Args:
            rows: Lists of parameters. With `moves`, the lists must contain all parameters that the
                step changes.
            moves: Whether the step changes the parameters.
        """
        found = [aligned_grads(params, self._place) for params in rows]
        params = list(itertools.chain.from_iterable(rows))
        every = list(itertools.chain.from_iterable(found))
        grads = [grad for grad in every if grad is not None]
        if len(grads) < len(every):
            params = [p for p, grad in zip(params, every, strict=True) if grad is not None]
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
        """Replace gradients by their copies, because gradients are about to be written."""
        if not self._copies:
            return
        for p in params:
            if p in self._copies:
                self._place.put(p, self._copies.pop(p))


def odd(grads: Sequence[Tensor]) -> list[int]:
    """Return the indices of tensors whose memory does not contain each element as it is read.

    torch negates or conjugates such a tensor on reading, or several elements of the tensor are
    stored at one address.
    """
    turned = any(map(Tensor.is_neg, grads)) or any(map(Tensor.is_conj, grads))
    if not turned and all(map(Tensor.is_contiguous, grads)):
        return []
    return [i for i, t in enumerate(grads) if t.is_neg() or t.is_conj() or _overlaps_itself(t)]


def plain(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Return whether all gradients are plain, share dtype and device, and do not share memory."""
    if torch.compiler.is_compiling() or not grads or not all_plain([*params, *grads]):
        return False
    if len(set(map(DTYPE, grads))) > 1 or len(set(map(DEVICE, grads))) > 1:
        return False
    if set(map(LAYOUT, grads)) != {torch.strided}:
        return False
    return not (odd(grads) or _shared(_spans(grads)))


def _shared(spans: Spans) -> bool:
    """Return whether any two tensors overlap in memory.

    The function sorts the starts and the ends of the tensors. If no tensors overlap, each tensor
    ends before the next one starts.
    """
    starts, ends = map(sorted, spans)
    return not all(map(operator.le, ends, starts[1:]))


def _inside(spans: Spans, params: Sequence[Tensor]) -> list[int]:
    """Return the indices of gradients that overlap with a parameter in memory."""
    param_spans = sorted(zip(*_spans(params), strict=True))
    starts = [start for start, _ in param_spans]
    # ends[k] is the largest end of the first k parameters
    ends = list(itertools.accumulate([end for _, end in param_spans], max, initial=0))
    grad_spans = enumerate(zip(*spans, strict=True))
    return [i for i, (start, end) in grad_spans if start < ends[bisect_left(starts, end)]]


def _spans(tensors: Sequence[Tensor]) -> Spans:
    """Return the addresses at which tensors begin and end. Both are 0 for empty tensors."""
    starts = addresses(tensors) or [0] * len(tensors)
    if all(map(Tensor.is_contiguous, tensors)):
        ends = list(map(operator.add, starts, map(BYTES, tensors)))
    else:
        ends = [
            start + extent(t) * t.element_size() for start, t in zip(starts, tensors, strict=True)
        ]
    if 0 in starts:
        ends = [start and end for start, end in zip(starts, ends, strict=True)]
    return starts, ends


def _overlaps_itself(t: Tensor) -> bool:
    """Return whether several elements of a tensor may be stored at one address.

    This is possible if a stride is shorter than the extent of the dims with smaller strides.
    """
    extent_so_far = 1
    pairs = zip(t.stride(), t.shape, strict=True)
    for stride, n in sorted([(stride, n) for stride, n in pairs if n > 1]):
        if stride < extent_so_far:
            return t.numel() > 0
        extent_so_far += (n - 1) * stride
    return False
