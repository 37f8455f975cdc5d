"""Runner: the base class of an engine, which runs the programs of tapes and stores their buffers.

A launch is one run of a program on the tensors of a bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal, Protocol

from torch import Tensor
from torch.autograd.graph import increment_version

from torchzero_clip.core.engine import Cover
from torchzero_clip.engines.buffers import Buffer, Buffers
from torchzero_clip.engines.compiled.printers.backends import call_of
from torchzero_clip.engines.compiled.printers.program import Launch
from torchzero_clip.engines.workspace import Workspaces


class StepWriter(Protocol):
    """The interface of `StepRecorder` (in replay/) that lists use while a step is recorded."""

    def open(self, gradients: Buffer) -> None:
        """Register a buffer of gradients, because each step has other gradients."""

    def changing(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether one of the tensors is a gradient. Each step has other gradients."""

    def memory(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return new memory that exists as long as the recorded step."""

    def launch(self, launch: Launch, runner: Callable[[], Runner | None]) -> Tensor | None:
        """Record a launch and its runner. Return a fake tensor in place of the statistics."""


class Runner:
    """The part of an engine that tapes use."""

    backend: Literal["native", "triton", "plain"] = "native"
    """How programs run:

    - "native": in C++ on the CPU, and in Triton on CUDA.
    - "triton": in Triton on both. On the CPU, Triton's interpreter runs the kernels.
    - "plain": node by node, in PyTorch."""
    watch: Cover | None = None
    """A function that returns a context for each launch. `explain` uses it to count bytes."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.workspaces = Workspaces()
        self.recorder: StepWriter | None = None  # present while a step is recorded

    def run(self, launch: Launch) -> Tensor | None:
        """Run a launch and return its statistics, or only record the launch in a recorded step."""
        if self.recorder is not None:
            return self.recorder.launch(launch, weakref.ref(self))
        with self.watch(launch.read, launch.written) if self.watch else nullcontext():
            stats = self._run(launch)
        increment_version(launch.written)  # autograd needs it, and kernels do not increment it
        return stats

    def memory(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return new memory for a step. Memory of a recorded step exists as long as the step."""
        return make() if self.recorder is None else self.recorder.memory(make)

    def _run(self, launch: Launch) -> Tensor | None:
        """Run a launch by its kernel. PyTorch processes tensors that the kernel cannot process."""
        every = range(len(launch.sizes))
        call = call_of(launch, self.backend)
        if call is None:
            return launch.run_by_torch(every)
        misfits = launch.misfits()
        if not misfits:
            return call(launch, launch.sizes)
        stats = call(launch, [0 if i in misfits else launch.sizes[i] for i in every])
        rest = launch.run_by_torch(misfits)
        if stats is not None and rest is not None:
            # one column at a time: an index list would be sent to the device
            for column, i in enumerate(launch.columns(misfits)):
                stats[:, i] = rest[:, column]
        return stats
