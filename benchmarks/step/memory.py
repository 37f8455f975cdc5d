"""How much memory a step allocates, and how much our eager engine keeps between steps."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step.chains import Build
from benchmarks.step.shapes import Shapes
from benchmarks.step.timing import WARM_UP, model, refill
from torchzero_clip import Modular

SIZE = 1024  # of square matrices
SHAPES: Shapes = [(SIZE, SIZE)] * 8 + [(SIZE,)] * 8


def allocated(build: Build, dtype: torch.dtype = torch.float32) -> list[int]:
    """The bytes of every allocation on CPU, in a step after the first ones."""
    params, fresh = model(SHAPES, False, "cpu", dtype)
    step = build(params)
    for _ in range(WARM_UP):
        refill(params, fresh)
        step()
    refill(params, fresh)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None, "the profiler has recorded nothing"
    sizes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    return [size for size in sizes if size > 0]


def as_large_as_parameters(build: Build, dtype: torch.dtype = torch.float32) -> int:
    """How many of them are at least as large as a matrix."""
    return sum(size >= dtype.itemsize * SIZE * SIZE for size in allocated(build, dtype))


def kept_bytes(build: Build, loose: bool = False, dtype: torch.dtype = torch.float32) -> float:
    """The bytes for each number of the parameters that our engine keeps besides the state."""
    params, fresh = model(SHAPES, loose, "cpu", dtype)
    step = build(params)
    for _ in range(WARM_UP):
        refill(params, fresh)
        step()
    optimizer = getattr(step, "__self__", None)
    if not isinstance(optimizer, Modular):
        raise TypeError(f"only a step of Modular keeps a workspace, got {step!r}")
    kept = optimizer.engine.lasting()
    return sum(t.numel() * t.itemsize for t in kept) / sum(p.numel() for p in params)
