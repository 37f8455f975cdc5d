"""Programs compiled by torch: for CUDA, and where cpp.py cannot build them.

A compiled program takes BATCH vectors of any sizes and is called once for each batch of tensors, so
that the time to compile does not grow with the model, and no change of sizes, numbers or of which
parameters have gradients makes another.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torchzero_clip.core.private import cpp_compiler, has_triton
from torchzero_clip.engines.compiled.build import compiler
from torchzero_clip.engines.compiled.program import Launch, Program, interpreted

BATCH = 16  # tensors that a program takes at a time
DUMMY = 2**16  # numbers in the tensors that it is compiled with: large enough for threads


@cache
def compiled(program: Program, width: int) -> Callable[..., None]:
    """The function of a program, compiled with tensors that are large and all of other sizes."""
    function: Callable[..., None] = torch.compile(
        interpreted(program, width), dynamic=True, fullgraph=True
    )
    make = [(dtype, DUMMY + 64 * i) for dtype in program.buffers for i in range(width)]
    try:
        function(
            torch.ones(max(program.numbers, 1), dtype=torch.float64, device=program.device),
            *[torch.ones(width, dtype=dtype, device=program.device) for dtype in program.vectors],
            *[torch.ones((), dtype=dtype, device=program.device) for dtype in program.scalars],
            *[torch.ones(size, dtype=dtype, device=program.device) for dtype, size in make],
        )
    except Exception as error:
        command = shlex.join(compiler() or ["g++"])
        on_cpu = program.device.type == "cpu"
        failed = f"neither {command} nor torch could" if on_cpu else "torch could not"
        why = str(error).strip().partition("\n")[0]
        raise RuntimeError(
            f"compile=True: {failed} compile a kernel ({why}); leave compile out to step without "
            "it, or name a C++ compiler that works in the environment variable CXX"
        ) from error
    return function


@cache
def _padding(position: int, lane: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small tensor that fills up the last batch, another for every buffer and lane."""
    return torch.ones(2, dtype=dtype, device=device)


def in_batches(launch: Launch, some: list[int]) -> None:
    """Launch for these tensors, BATCH at a time."""
    for begin in reversed(range(0, len(some), BATCH)):  # the last ones that a norm read are cached
        _batch(launch, some[begin : begin + BATCH])


def _batch(launch: Launch, some: list[int]) -> None:
    """One call of the program, filled up with small tensors where these are the last."""
    missing = BATCH - len(some)
    tensors: list[Tensor | None] = []
    for position, buffer in enumerate(launch.buffers):
        tensors += [buffer.vectors[i] for i in some]
        fill = buffer.dtype, launch.program.device
        tensors += [_padding(position, lane, *fill) for lane in range(missing)]
    vectors = []
    for vector in launch.vectors:  # slices: a list of places would be copied to the device first
        parts = [vector[i : i + 1] for i in some]
        if some[-1] - some[0] == len(some) - 1:
            parts = [vector[some[0] : some[-1] + 1]]
        vectors.append(torch.cat([*parts, vector.new_ones(missing)]))
    compiled(launch.program, BATCH)(launch.sent, *vectors, *launch.scalars, *tensors)


def missing(kind: str) -> str | None:
    """The sentence about what torch lacks to compile for a kind of device, or None."""
    if kind == "cuda":
        return None if has_triton() else "needs Triton for parameters on cuda: pip install triton"
    if kind != "cpu":
        return f"works for parameters on cpu and cuda, got some on {kind}"
    if compiler() is not None:  # build.py's, and torch would find the same
        return None
    try:
        cpp_compiler()
    except Exception as error:
        return (
            "needs a C++ compiler: install g++ or clang, or name one in the environment variable "
            f"CXX (torch found none: {type(error).__name__})"
        )
    return None
