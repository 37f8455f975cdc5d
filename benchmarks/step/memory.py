"""How much memory a step allocates."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from benchmarks.step.chains import Build
from benchmarks.step.timing import WARM_UP, model, refill

SIZE = 1024  # of square matrices, more numbers than a piece has


def allocated(build: Build) -> list[int]:
    """The bytes of every allocation on CPU, in a step after the first ones."""
    params, fresh = model([(SIZE, SIZE)] * 8 + [(SIZE,)] * 8, False, "cpu")
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


def as_large_as_parameters(build: Build) -> int:
    """How many of them are at least as large as a matrix."""
    return sum(size >= 4 * SIZE * SIZE for size in allocated(build))
