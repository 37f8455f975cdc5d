"""One case of a clip function on one rank: what it does, and the likely cause of what is wrong."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.audit.clip_cases import ClipCase
from torchzero_clip.core.torch_private import TorchDispatchMode, tree_leaves

FRESH = 1.75  # fresh memory that a clip may take, in gradients of a rank
MEASURED = 2**15  # bytes of gradients whose memory is compared


class Fresh(TorchDispatchMode):
    """The most memory that was reserved at once since the block began."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._alive = 0, {0: 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any([kind.__name__ == "DTensor" for kind in types]):  # it comes again, as its parts
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for t in _tensors(out):
            memory = t.untyped_storage()
            if memory.data_ptr() not in old and memory.data_ptr() not in self._alive:
                self._reserve(memory)
        return out

    def _reserve(self, memory: torch.UntypedStorage) -> None:
        place, alive = memory.data_ptr(), self._alive
        alive[place] = memory.nbytes()
        self.peak = max(self.peak, sum(alive.values()))
        weakref.finalize(memory, alive.pop, place, None)


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if type(t) in (Tensor, torch.nn.Parameter)]


def tried(function: Callable[..., Any], case: ClipCase) -> dict[str, Any]:
    """What a function does in one case, on this rank."""
    wanted = 1.0 if case.bad or case.norm == 0 else case.share * case.norm
    before = [t.clone() for t in case.here] if case.norm and not case.bad else []
    more = {"case": case} if "case" in _arguments(function) else {}
    bytes_here = sum([t.numel() * t.element_size() for t in case.here])
    with Fresh() as fresh:
        returned = function(iter(case.params) if case.once else case.params, wanted, **more)
    found = None if returned is None else float(_whole(returned))
    del returned
    out: dict[str, Any] = {"expected": case.norm, "found": found, "why": ""}
    out["fresh"] = fresh.peak / bytes_here if bytes_here >= MEASURED else None
    if case.bad:
        if found is not None and math.isfinite(found):
            out["why"] = f"a gradient that is no number has the norm {found:.4g}"
        return out
    if found is not None and not _near(found, case.norm, case.loose):
        out["why"] = _cause(found, case)
        return out
    keep = min(case.share, 1.0)
    pairs = [(a, b * keep) for a, b in zip(case.here, before, strict=False)]
    ratios = [(a.double().norm() / b.double().norm()).item() for a, b in pairs if a.numel()]
    off = [x for x in ratios if not _near(x, 1.0, max(2 * case.loose, 1e-3))]
    if off:
        out["why"] = f"gradients are {off[0]:.4g} of what they should be"
        if found is None:
            cause = _cause(case.norm / off[0], case).partition(": ")[2]
            out["why"] += f": {cause}" if cause else ""
    elif keep == 1 and not all([torch.equal(a, b) for a, b in pairs]):
        out["why"] = "gradients within the limit are not what they were, bit for bit"
    elif out["fresh"] is not None and out["fresh"] > FRESH:
        out["why"] = f"it takes {out['fresh']:.1f} times the memory of the gradients here"
    return out


def _whole(norm: Any) -> Any:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _near(x: float, y: float, loose: float) -> bool:
    return math.isclose(x, y, rel_tol=loose)


def _cause(found: float, case: ClipCase) -> str:
    """What is wrong about a norm, and why where a known mistake finds the same."""
    ratio = found / case.norm if case.norm else math.inf
    known = [
        name
        for name, norm in case.mistakes.items()
        if (norm == found or _near(norm, found, 1e-4)) and not _near(norm, case.norm, case.loose)
    ]
    what = f"the norm is {ratio:.4g} of the right one"
    return f"{what}: {known[0]}" if known else what


def _arguments(function: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
