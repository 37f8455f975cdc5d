"""Kernels compiled by torch: for CUDA, and where native.py cannot build them.

A kernel takes WIDTH flat tensors of any sizes and is called in turns, so that the time to compile
does not grow with the model, and no change of sizes, numbers or of which parameters have gradients
makes another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torchzero_clip.core.kernel import Job, Kernel, plain
from torchzero_clip.core.native import compiler

WIDTH = 16  # tensors that a kernel takes at a time
DUMMY = 2**16  # numbers in the tensors that a kernel is compiled with: large enough for threads


@cache
def compiled(kernel: Kernel, width: int) -> Callable[..., None]:
    """The function of a kernel, compiled with tensors that are large and all of other sizes."""
    function: Callable[..., None] = torch.compile(
        plain(kernel, width), dynamic=True, fullgraph=True
    )
    make = [(dtype, DUMMY + 64 * i) for dtype in kernel.lists for i in range(width)]
    function(
        torch.ones(max(kernel.numbers, 1), dtype=torch.float64, device=kernel.device),
        *[torch.ones(width, dtype=dtype, device=kernel.device) for dtype in kernel.rows],
        *[torch.ones((), dtype=dtype, device=kernel.device) for dtype in kernel.scalars],
        *[torch.ones(size, dtype=dtype, device=kernel.device) for dtype, size in make],
    )
    return function


@cache
def _padding(position: int, lane: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor to fill the last call with, another for every list and lane."""
    return torch.ones(2, dtype=dtype, device=device)


def in_turns(job: Job, some: list[int]) -> None:
    """Do it for these tensors, WIDTH at a time."""
    for begin in reversed(range(0, len(some), WIDTH)):  # what a norm read last is in the cache
        _together(job, some[begin : begin + WIDTH])


def _together(job: Job, some: list[int]) -> None:
    """One call of the kernel, filled up with small tensors where these are the last."""
    spare = WIDTH - len(some)
    flats: list[Tensor | None] = []
    for position, home in enumerate(job.homes):
        flats += [home.flats[i] for i in some]
        fill = home.dtype, job.kernel.device
        flats += [_padding(position, lane, *fill) for lane in range(spare)]
    rows = []
    for (
        row
    ) in job.rows:  # by slices: a list of places would be copied to the device, and waited for
        parts = [row[i : i + 1] for i in some]
        if some[-1] - some[0] == len(some) - 1:
            parts = [row[some[0] : some[-1] + 1]]
        rows.append(torch.cat([*parts, row.new_ones(spare)]))
    compiled(job.kernel, WIDTH)(job.numbers, *rows, *job.scalars, *flats)


def missing(kind: str) -> str | None:
    """What torch lacks to compile for a kind of device."""
    if kind == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "needs Triton for parameters on cuda: pip install triton"
    if kind != "cpu":
        return f"works for parameters on cpu and cuda, got some on {kind}"
    if compiler() is not None:  # native.py's, and torch would find the same
        return None
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:  # another torch has it elsewhere, and says so itself at the first step
        return None
    try:
        get_cpp_compiler()
    except Exception as error:
        return (
            "needs a C++ compiler: install g++ or clang, or name one in the environment variable "
            f"CXX (torch found none: {type(error).__name__})"
        )
    return None
