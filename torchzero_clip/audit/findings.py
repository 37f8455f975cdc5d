"""Findings: the lines of a step that have the host wait, keep it from a graph, or cost."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.optim import Optimizer

from torchzero_clip.audit.ledger import Ledger, Request, differences

FEW = 4  # tensors, below which a call for each cannot be told from others
LARGE, LEAST = 0.5, 4096  # of the gradients, and bytes, that a line may reserve unnamed
WAITS = {"read": "the host reads a value", "copy": "host and device copy", "wait": "waits inside"}


@dataclass(frozen=True)
class Finding:
    """A line, and what is the matter with it.

    Attributes:
        kind: A "read", a "copy", or a "wait" inside an operator has the host wait. A "change" from
            step to step, and a "refusal" of torch's, keep a step from a graph. A "loop" starts a
            kernel for each tensor, and "memory" is as large as the model: they cost.
        where: The file and line.
        what: What is the matter.
        times: How often in a step.
        called: Where that is in torch, the file and line outside that called it.
    """

    kind: str
    where: str
    what: str
    times: int = 1
    called: str = ""

    def __str__(self) -> str:
        often = f", {self.times} times" if self.times > 1 else ""
        called = f", called at {short(self.called)}" if self.called else ""
        return f"{short(self.where)}: {self.what}{often}{called}"


def short(place: str) -> str:
    """A place as one looks for it: from the working directory on, or from where packages lie."""
    home, _, inside = place.rpartition("site-packages" + os.sep)
    return inside if home else place.removeprefix(os.getcwd() + os.sep)


def waits(ledger: Ledger) -> list[Finding]:
    """Where the host waits for the device."""
    found = []
    for request in ledger.requests:
        kind = "wait" if request.waits else request.kind
        if kind in WAITS:
            found.append(_finding(kind, request, f"{WAITS[kind]} ({request.name})"))
    return _counted(found)


def changes(one: Ledger, other: Ledger) -> list[Finding]:
    """What the second of two steps asks otherwise than the first."""
    found = differences(one, other)
    return _counted([_finding("change", x, f"{x.name} {how}") for x, how in found])


def refusals(stepped: Iterable[Optimizer]) -> Iterator[Finding]:
    """Optimizers of torch that are not told that they are captured."""
    for opt in stepped:
        theirs = any([c.__module__.startswith("torch.optim.") for c in type(opt).__mro__[:-2]])
        if theirs and any([group.get("capturable") is False for group in opt.param_groups]):
            code = inspect.unwrap(type(opt).step).__code__
            what = f"torch captures no {type(opt).__name__} that is made without capturable=True"
            yield Finding("refusal", f"{code.co_filename}:{code.co_firstlineno}", what)


def loops(ledger: Ledger, tensors: int) -> Iterator[Finding]:
    """Lines that start a kernel for each tensor."""
    calls: Counter[tuple[str, str]] = Counter()
    for request in ledger.of("call"):
        calls[request.where, request.name] += request.calls
    most = {where: max([n for (at, _), n in calls.items() if at == where]) for where, _ in calls}
    for request in _firsts(ledger.of("call")):
        if (times := most[request.where]) >= tensors >= FEW:
            yield _finding("loop", request, "starts a kernel for each tensor", times)


def memory(ledger: Ledger, size: int) -> Iterator[Finding]:
    """Lines that reserve as much as gradients of this size do, or half of it and more."""
    fresh: Counter[str] = Counter()
    for request in ledger.requests:
        fresh[request.where] += request.fresh
    for request in _firsts([request for request in ledger.requests if request.fresh]):
        if fresh[request.where] >= max(LARGE * size, LEAST):
            share = fresh[request.where] / size
            yield _finding("memory", request, f"reserves {share:.1f} of the gradients' memory")


def _finding(kind: str, request: Request, what: str, times: int = 1) -> Finding:
    return Finding(kind, request.where, what, times, request.called)


def _firsts(requests: Iterable[Request]) -> list[Request]:
    """The first request of each line."""
    found: dict[str, Request] = {}
    for request in requests:
        found.setdefault(request.where, request)
    return list(found.values())


def _counted(found: Iterable[Finding]) -> list[Finding]:
    """Each finding once, with how often it is there."""
    return [
        Finding(x.kind, x.where, x.what, times, x.called) for x, times in Counter(found).items()
    ]
