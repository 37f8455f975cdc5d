"""Runner: the interface between a trace and the engine that runs its programs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor

from torchzero_clip.engines.buffers import Buffers
from torchzero_clip.engines.compiled.program import Launch, Programs
from torchzero_clip.engines.tape import Tape


class Runner(Protocol):
    """All that a trace knows of its engine."""

    buffers: Buffers
    programs: Programs
    tape: Tape | None

    def spare(self, key: Hashable, places: Sequence[int], params: Sequence[Tensor]) -> list[Tensor]:
        """Memory like the parameters that is kept under this key."""
        ...

    def run(self, launch: Launch) -> Tensor | None:
        """Run a program; returns the statistics of what it measures, where it can."""
        ...
