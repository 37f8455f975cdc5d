"""One case of a clip audit on one rank, and the likely cause of a wrong norm."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from torchzero_clip.audit.clip_cases import ClipCase
from torchzero_clip.core.torch_private import TorchDispatchMode, tree_leaves

MEMORY_ALLOWED = 1.75
"""A clip function may use new memory of at most this multiple of the memory of the gradients."""
MEASURED_BYTES = 2**15
"""The audit compares the used memory only if the gradients of a rank have at least these bytes."""


class CaseResult(TypedDict):
    """The result of a clip function in one case on one rank.

    Attributes:
        expected: The norm of the gradients.
        found: The norm that the function returned, or None.
        fresh: The peak of the new memory that the function used, divided by the memory of the
            gradients of the rank. None if the gradients are too small to compare.
        why: The error, or "" if everything is right.
        raised: Whether the function raised an error.
    """

    expected: float
    found: float | None
    fresh: float | None
    why: str
    raised: bool


class PeakMemory(TorchDispatchMode):
    """A context manager that measures the peak of the memory of new tensors.

    Attributes:
        peak: The largest number of bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        # the bytes of new memory, by address; 0 is the address of all empty tensors
        self._in_use = {0: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any([kind.__name__ == "DTensor" for kind in types]):
            return NotImplemented  # torch then dispatches the operators on the local shards
        result = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for t in _tensors(result):
            memory = t.untyped_storage()
            if memory.data_ptr() not in old and memory.data_ptr() not in self._in_use:
                self._allocate(memory)
        return result

    def _allocate(self, memory: torch.UntypedStorage) -> None:
        address = memory.data_ptr()
        self._in_use[address] = memory.nbytes()
        self.peak = max(self.peak, sum(self._in_use.values()))
        weakref.finalize(memory, self._in_use.pop, address, None)


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if type(t) in (Tensor, torch.nn.Parameter)]


def try_case(function: Callable[..., Any], case: ClipCase) -> CaseResult:
    """Call a clip function in one case on this rank, and check the norm and the gradients."""
    max_norm = 1.0 if case.is_nan or case.norm == 0 else case.share * case.norm
    before = [t.clone() for t in case.local_grads] if case.norm and not case.is_nan else []
    keywords = {"case": case} if "case" in _arguments(function) else {}
    bytes_here = sum([t.numel() * t.element_size() for t in case.local_grads])
    params = iter(case.params) if case.as_generator else case.params
    with PeakMemory() as memory:
        returned = function(params, max_norm, **keywords)
    norm = None if returned is None else float(_whole(returned))
    fresh = memory.peak / bytes_here if bytes_here >= MEASURED_BYTES else None
    why = _wrong_norm(norm, case)
    if not why and not case.is_nan:
        why = _wrong_gradients(before, case, returns_norm=norm is not None)
        if not why and fresh is not None and fresh > MEMORY_ALLOWED:
            why = f"it allocates {fresh:.1f} times the memory of the gradients on this rank"
    return {"expected": case.norm, "found": norm, "fresh": fresh, "why": why, "raised": False}


def _wrong_norm(norm: float | None, case: ClipCase) -> str:
    """Return the error in the norm that a function returned, or "" if the norm is right."""
    if norm is None:
        return ""
    if case.is_nan:
        wrong = f"the norm is {norm:.4g} although a gradient is NaN"
        return wrong if math.isfinite(norm) else ""
    return "" if _near(norm, case.norm, case.tolerance) else _cause(norm, case)


def _wrong_gradients(before: Sequence[Tensor], case: ClipCase, returns_norm: bool) -> str:
    """Return the error in the gradients that a function has scaled, or "" if they are right."""
    factor = min(case.share, 1.0)
    pairs = [(t, old * factor) for t, old in zip(case.local_grads, before, strict=False)]
    ratios = [(t.double().norm() / right.double().norm()).item() for t, right in pairs if t.numel()]
    wrong = [x for x in ratios if not _near(x, 1.0, max(2 * case.tolerance, 1e-3))]
    if wrong:
        message = f"gradients are {wrong[0]:.4g} times the right gradients"
        if returns_norm:
            return message
        # the function has scaled by this norm, which tells the cause
        cause = _cause(case.norm / wrong[0], case).partition(": ")[2]
        return f"{message}: {cause}" if cause else message
    if factor == 1 and not all([torch.equal(t, right) for t, right in pairs]):
        return "gradients changed although their norm is below max_norm"
    return ""


def _whole(norm: Any) -> Any:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _near(x: float, y: float, tolerance: float) -> bool:
    return math.isclose(x, y, rel_tol=tolerance)


def _cause(found: float, case: ClipCase) -> str:
    """Return a message about a wrong norm. If a known mistake gives the same norm, name it."""
    ratio = found / case.norm if case.norm else math.inf
    message = f"the norm is {ratio:.4g} times the right norm"
    for mistake, norm in case.mistakes.items():
        explains = norm == found or _near(norm, found, 1e-4)
        if explains and not _near(norm, case.norm, case.tolerance):
            return f"{message}: {mistake}"
    return message


def _arguments(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
