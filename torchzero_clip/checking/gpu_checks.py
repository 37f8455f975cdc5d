"""Checks that need a GPU: CUDA graphs of the user, other threads, and very large tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from torchzero_clip.checking.chain_checks import Yardstick, allowed, distance
from torchzero_clip.checking.check_cases import HEADLINE, clip
from torchzero_clip.checking.device_report import CheckResult, measured
from torchzero_clip.checking.training_runs import (
    RunSetting,
    give,
    gradients,
    optimizer_for,
    parameters,
    synchronize,
)
from torchzero_clip.core.plurals import counted
from torchzero_clip.modules.descent import LR
from torchzero_clip.optimizer import Modular

STEPS_BEFORE_CAPTURE = 4
REPLAYS = 3
MANY_ELEMENTS = 2**31 + 4099
"""More elements than a 32-bit index can count."""
MANY_ELEMENTS_BYTES = 40 << 30
PINNED_BYTES = 2**16


def own_graph_check(mode: str, device: torch.device) -> Iterator[CheckResult]:
    """Capture `opt.step` in a CUDA graph, as a user can do, and replay the graph.

    An optimizer that runs the same steps without a graph must have the same weights. This is not so
    if the capture itself changes weights.
    """
    setting = RunSetting(mode, device)
    grads = [g.to(device) for g in next(gradients(HEADLINE, 1))]
    params = parameters(HEADLINE.shapes, setting)
    expected = parameters(HEADLINE.shapes, setting)
    give(params, grads, new=True)
    give(expected, grads, new=True)
    opt = optimizer_for(HEADLINE, params, mode)
    plain = optimizer_for(HEADLINE, expected, "plain")
    for _ in range(STEPS_BEFORE_CAPTURE + REPLAYS):
        plain.step()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(STEPS_BEFORE_CAPTURE):
            opt.step()
    torch.cuda.current_stream(device).wait_stream(stream)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    for _ in range(REPLAYS):
        graph.replay()
    synchronize(device)
    error = distance([p.detach() for p in params], [p.detach() for p in expected])
    limit = allowed(0.0, torch.float32)
    figure = f"{error:.1e} relative error"
    yield measured("your own CUDA graph", mode, HEADLINE.name, error, limit, figure)


def pinned_memory_check(yardstick: Yardstick, device: torch.device) -> Iterator[CheckResult]:
    """Capture steps while another thread pins memory, as a `DataLoader` does."""
    check = "capture while a thread pins memory"
    with pinning_thread() as errors:
        result, _ = yardstick.compare(check, RunSetting("captured", device))
    yield result
    count = len(errors)
    figure = f"{counted(count, 'error')} in the thread"
    yield measured(check, "captured", "the thread", count, 0, figure, "; ".join(errors))


@contextmanager
def pinning_thread() -> Iterator[list[str]]:
    """Pin memory in another thread inside the block. Collect the errors of this thread."""
    is_over = threading.Event()
    errors: list[str] = []

    def pin() -> None:
        pages = 1
        while not is_over.is_set() and not errors:
            try:
                torch.empty(pages * PINNED_BYTES, dtype=torch.uint8).pin_memory()
            except RuntimeError as error:
                errors.append(str(error))
            pages = pages % 97 + 1  # other sizes, so that the allocator must pin new memory

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        is_over.set()
        thread.join(10)


def many_elements_check(mode: str, device: torch.device) -> Iterator[CheckResult]:
    """Clip and subtract a gradient of ones with more elements than a 32-bit index can count."""
    p = Parameter(torch.zeros(MANY_ELEMENTS, dtype=torch.bfloat16, device=device))
    p.grad = torch.ones_like(p)
    rate = 2.0**16
    opt = Modular([p], clip(), LR(rate), compile=mode == "compiled", rounding="nearest")
    opt.step()
    expected = -rate / math.sqrt(MANY_ELEMENTS)
    # the extremes cover every element, and need no other tensor of this size
    values = [float(p.detach().min()), float(p.detach().max())]
    error = max([abs(value / expected - 1) for value in values])
    limit = 2 * torch.finfo(torch.bfloat16).eps
    figure = f"{error:.1e} relative error"
    yield measured("more than 2^31 elements", mode, HEADLINE.name, error, limit, figure)
