"""Findings: the lines of a step that synchronize, that prevent a CUDA graph, or that are slow."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.optim import Optimizer

from torchzero_clip.audit.ledger import Ledger, Request, differences

LOOP_LENGTH = 4
"""The smallest number of tensors for which a line is reported as a loop over tensors."""
MEMORY_SHARE = 0.5
"""A line may allocate this share of the gradients' memory without a finding."""
MEMORY_BYTES = 4096
"""A line may allocate this number of bytes without a finding."""
WAITS = {
    "read": "copies a value to the CPU",
    "copy": "copies between CPU and GPU",
    "wait": "calls an operator that synchronizes",
}


@dataclass(frozen=True)
class Finding:
    """A line of code with a problem.

    Attributes:
        kind: The kind of problem. The host waits for the device if a line reads a value ("read"),
            copies between devices ("copy"), or calls an operator that synchronizes ("wait"). A CUDA
            graph is impossible if a line does something else in each step ("change"), or if torch
            refuses to capture the optimizer ("refusal"). A line only costs time if it starts a
            kernel for each tensor ("loop"). A line only costs memory if it allocates a large share
            of the memory of the gradients ("memory").
        where: The file and line.
        what: A description of the problem.
        times: The number of times that the problem occurs in one step.
        called: If `where` is a line of torch, the file and line of the code that called torch.
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
    """Return a path relative to site-packages or to the working directory."""
    home, _, inside = place.rpartition("site-packages" + os.sep)
    return inside if home else place.removeprefix(os.getcwd() + os.sep)


def waits(ledger: Ledger) -> list[Finding]:
    """Return the lines where the host waits for the device."""
    findings = []
    for request in ledger.requests:
        kind = "wait" if request.waits else request.kind
        if kind in WAITS:
            findings.append(_finding(kind, request, f"{WAITS[kind]} ({request.name})"))
    return _counted(findings)


def changes(one: Ledger, other: Ledger) -> list[Finding]:
    """Return the lines where the second of two steps differs from the first."""
    pairs = differences(one, other)
    return _counted(
        [_finding("change", request, f"{request.name} {how}") for request, how in pairs]
    )


def refusals(optimizers: Iterable[Optimizer]) -> Iterator[Finding]:
    """Yield a finding for each torch optimizer that was made without `capturable=True`."""
    for opt in optimizers:
        bases = type(opt).__mro__[:-2]  # without Optimizer and object
        is_of_torch = any([base.__module__.startswith("torch.optim.") for base in bases])
        if is_of_torch and any([group.get("capturable") is False for group in opt.param_groups]):
            code = inspect.unwrap(type(opt).step).__code__
            message = f"{type(opt).__name__} must be constructed with capturable=True"
            yield Finding("refusal", f"{code.co_filename}:{code.co_firstlineno}", message)


def loops(ledger: Ledger, tensors: int) -> Iterator[Finding]:
    """Yield the lines that start the same kernel for each tensor.

    Args:
        ledger: The ledger of a step.
        tensors: The number of tensors that have a gradient.
    """
    if tensors < LOOP_LENGTH:
        return
    calls: Counter[tuple[str, str]] = Counter()
    for request in ledger.of("call"):
        calls[request.where, request.name] += request.calls
    most: dict[str, int] = {}
    for (where, _), count in calls.items():
        most[where] = max(most.get(where, 0), count)
    for request in _first_of_each_line(ledger.of("call")):
        times = most[request.where]
        if times >= tensors:
            yield _finding("loop", request, "starts one kernel for each tensor", times)


def memory(ledger: Ledger, size: int) -> Iterator[Finding]:
    """Yield the lines that allocate a large share of the memory of the gradients.

    Args:
        ledger: The ledger of a step.
        size: The number of bytes of all gradients.
    """
    fresh: Counter[str] = Counter()
    for request in ledger.requests:
        fresh[request.where] += request.fresh
    allocating = [request for request in ledger.requests if request.fresh]
    for request in _first_of_each_line(allocating):
        if fresh[request.where] >= max(MEMORY_SHARE * size, MEMORY_BYTES):
            share = fresh[request.where] / size
            what = f"allocates {share:.1f} times the memory of the gradients"
            yield _finding("memory", request, what)


def _finding(kind: str, request: Request, what: str, times: int = 1) -> Finding:
    return Finding(kind, request.where, what, times, request.called)


def _first_of_each_line(requests: Iterable[Request]) -> list[Request]:
    first: dict[str, Request] = {}
    for request in requests:
        first.setdefault(request.where, request)
    return list(first.values())


def _counted(findings: Iterable[Finding]) -> list[Finding]:
    """Return each finding once, with the number of times that the finding occurs."""
    return [
        Finding(x.kind, x.where, x.what, times, x.called) for x, times in Counter(findings).items()
    ]
