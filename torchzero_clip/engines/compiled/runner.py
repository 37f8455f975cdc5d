"""Runner: runs programs, and keeps what they need from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor
from torch.autograd.graph import increment_version

from torchzero_clip.core.engine import Watch
from torchzero_clip.engines.buffers import Buffers
from torchzero_clip.engines.compiled.cpp import native
from torchzero_clip.engines.compiled.inductor import in_batches
from torchzero_clip.engines.compiled.program import Launch
from torchzero_clip.engines.compiled.recorder import StepRecorder
from torchzero_clip.engines.workspace import Workspaces


class Runner:
    """All that a trace knows of its engine."""

    backend: Literal["native", "torch", "plain"] = "native"
    """The way programs run on CPU: as our own C++, by torch's compiler, or node by node."""
    watch: Watch | None = None
    """What surrounds every launch; `explain` counts bytes with it."""

    def __init__(self) -> None:
        self.buffers, self.workspaces = Buffers(), Workspaces()
        self.recorder: StepRecorder | None = None  # of the step that is written down

    def run(self, launch: Launch) -> Tensor | None:
        """Run a program, or write it down where the step is.

        Returns the statistics of what it measures, or None where it cannot.
        """
        if self.recorder is not None:
            again = partial(_run, weakref.ref(self))  # a replay is held by its engine
            return self.recorder.launch(launch, again, self._measures(launch))
        watch = self.watch
        with nullcontext() if watch is None else watch(launch.read, launch.written):
            stats = self._run(launch)
        increment_version(launch.written)  # autograd looks at it, and programs do not move it
        return stats

    def memory(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Memory that a step takes, and that lasts where the step is written down."""
        if self.recorder is None:
            return make()
        with self.recorder.real():
            made = make()
        self.recorder.made += made
        return made

    def _measures(self, launch: Launch) -> bool:
        program = launch.program
        if self.backend == "plain" or program.measured is None:
            return program.measured is not None
        here = self.backend == "native" and program.device.type == "cpu"
        return here and native(program) is not None

    def _run(self, launch: Launch) -> Tensor | None:
        program, sizes, every = launch.program, launch.sizes, range(len(launch.sizes))
        if self.backend == "plain":
            return launch.plainly(every)
        here = self.backend == "native" and program.device.type == "cpu"
        if here and (call := native(program)) is not None:
            odd = launch.misfits()
            stats = call(launch, [0 if i in odd else sizes[i] for i in every] if odd else sizes)
            some = launch.plainly(odd)
            if stats is not None and some is not None:
                stats[:, odd] = some
            return stats
        if program.stores:  # torch measures what they hold
            launch = replace(launch, program=program._replace(measured=None))
            single = [i for i in every if sizes[i] < 2]  # torch would compile those apart
            apart = {*launch.misfits(), *single}
            in_batches(launch, [i for i in every if i not in apart])
            launch.plainly(apart)
        return None


def _run(runner: Callable[[], Runner | None], launch: Launch) -> Tensor | None:
    found = runner()
    assert found is not None
    return found.run(launch)
