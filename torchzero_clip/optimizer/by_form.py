"""By form: calls on gradients, done from a tape where earlier ones had gradients of equal form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensors import DTYPE, LAYOUT, SHAPE, all_plain
from torchzero_clip.engines import AT_ONCE, Eager
from torchzero_clip.engines.repeated import Repeated
from torchzero_clip.engines.tape import Tape

MOST = 64  # tapes that are kept
ON_CPU = operator.attrgetter("is_cpu")

Work = Callable[[Eager], list[Tensor]]


class Row(NamedTuple):
    """Gradients, as the function of a tape takes them."""

    tensors: list[Tensor]


class ByForm:
    """The tapes of calls. None of them holds a parameter or a gradient, so they outlive both."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Repeated | int] = {}  # or how often a call was made

    def __call__(self, kind: Hashable, params: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Do the work of a kind on the gradients of parameters; returns what it makes."""
        grads = [p.grad for p in params if p.grad is not None]
        form = None if torch.compiler.is_compiling() else _form(params, grads)
        if form is None:
            return work(AT_ONCE)
        known = self._known.get((kind, form), 0)
        if isinstance(known, Repeated):
            return known([Row(grads)])
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[kind, form] = known + 1
        seldom = known == 0 or known & (known - 1)  # recorded are the second call, third, fifth …
        if seldom or sum(map(Tensor.numel, grads)) > Eager.repeats:
            return work(AT_ONCE)
        engine = Eager(defers=False, keeps=False, reads=False)
        engine.tape = tape = Tape(steady=False)
        with tape:
            made = work(engine)
        function = None if tape.refused or tape.leaves else tape.function(made)
        tape.close()
        if function is not None and function.holds(()) and not function.keeps_tensors:
            self._known[kind, form] = function
        return made


def _form(params: Sequence[Tensor], grads: Sequence[Tensor]) -> Hashable | None:
    """The form of gradients that lie in one bucket, on CPU and without gaps; None of others."""
    if len(grads) < len(params):
        params = [p for p in params if p.grad is not None]
    if not grads or len(set(map(id, grads))) < len(grads) or not all_plain([*params, *grads]):
        return None
    shapes, dtypes = tuple(map(SHAPE, grads)), (set(map(DTYPE, params)), set(map(DTYPE, grads)))
    fits = (
        tuple(map(SHAPE, params)) == shapes
        and {torch.strided}.issuperset(map(LAYOUT, grads))
        and all(map(Tensor.is_contiguous, grads))
        and not any(map(Tensor.is_neg, grads))
        and all(map(ON_CPU, grads))
        and len(dtypes[0]) == len(dtypes[1]) == 1
    )
    return (shapes, *dtypes[0], *dtypes[1]) if fits else None
