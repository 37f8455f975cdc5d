"""Runner: runs programs, and keeps what they need from step to step."""

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
    """What writes down the step that is on its way, as lists see it."""

    def open(self, gradients: Buffer) -> None:
        """Note a buffer of gradients, which is another one in every step."""

    def changing(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a gradient is among them, which is another tensor in every step."""

    def memory(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Memory that is made now, and lasts as long as the graph."""

    def launch(self, launch: Launch, runner: Callable[[], Runner | None]) -> Tensor | None:
        """Write down the launch of a program by what runs it later; what it measures."""


class Runner:
    """All that a tape knows of its engine."""

    backend: Literal["native", "triton", "plain"] = "native"
    """The way programs run: in C++ on CPU and in Triton on CUDA, in Triton on both, which on CPU
    takes its interpreter, or node by node."""
    watch: Cover | None = None
    """What surrounds every launch; `explain` counts bytes with it."""

    def __init__(self) -> None:
        self.buffers, self.workspaces = Buffers(), Workspaces()
        self.recorder: StepWriter | None = None  # of the step that is written down

    def run(self, launch: Launch) -> Tensor | None:
        """Run a program, or write it down where the step is.

        Returns the statistics of what it measures.
        """
        if self.recorder is not None:
            return self.recorder.launch(launch, weakref.ref(self))
        with self.watch(launch.read, launch.written) if self.watch else nullcontext():
            stats = self._run(launch)
        increment_version(launch.written)  # autograd looks at it, and programs do not move it
        return stats

    def memory(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Memory that a step takes, and that lasts where the step is written down."""
        return make() if self.recorder is None else self.recorder.memory(make)

    def _run(self, launch: Launch) -> Tensor | None:
        sizes, every = launch.sizes, range(len(launch.sizes))
        call = call_of(launch, self.backend)
        if call is None:
            return launch.plainly(every)
        odd = launch.misfits()
        stats = call(launch, [0 if i in odd else sizes[i] for i in every] if odd else sizes)
        some = launch.plainly(odd)
        if stats is not None and some is not None:
            for column, i in enumerate(launch.columns(odd)):  # a list would be sent to the device
                stats[:, i] = some[:, column]
        return stats
