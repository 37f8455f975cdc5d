"""Again: a launch as a tape notes it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.program import Launch
from torchzero_clip.engines.tape import Tape

Run = Callable[[Launch], "Tensor | None"]


class Again:
    """A launch with other tensors and numbers."""

    def __init__(self, run: Run, launch: Launch, count: int) -> None:
        self._run, self._form = run, f"{count}d"
        self._launch = launch._replace(buffers=[], vectors=[], scalars=[])
        self._memory = bytearray(8 * max(count, 1))
        self._numbers = torch.frombuffer(self._memory, dtype=torch.float64)

    def __call__(
        self,
        buffers: list[Buffer],
        numbers: Sequence[float],
        vectors: list[Tensor],
        scalars: list[Tensor],
    ) -> Tensor | None:
        struct.pack_into(self._form, self._memory, 0, *numbers)
        program, sizes, elements = self._launch.program, self._launch.sizes, self._launch.elements
        return self._run(Launch(program, buffers, self._numbers, vectors, scalars, sizes, elements))


def launched(tape: Tape, run: Run, launch: Launch, numbers: Sequence[float]) -> Tensor | None:
    """Run a program, and note it; `numbers` are those that it takes."""
    with tape.paused():
        stats = run(launch)
    if not all(map(tape.knows, launch.buffers)):
        tape.refuse("a list lies in memory that does not last")
        return stats
    again, given = Again(run, launch, len(numbers)), (launch.vectors, launch.scalars)
    tape.note(again, (launch.buffers, list(numbers), *map(list, given)), stats, changes={"memory"})
    return stats
