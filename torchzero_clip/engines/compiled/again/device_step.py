"""Device steps: the vectors between two launches as one kernel in Triton.

A vector waits for the launch whose numbers it takes, and others wait with it, so that there are as
few kernels as can be.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, TypeAlias

from torch import Tensor

from torchzero_clip.core.tensors import storages
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.again.steps import CompiledStep, misfits
from torchzero_clip.engines.compiled.printers import triton
from torchzero_clip.engines.compiled.printers.launches import TritonKernel, launch
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.tables import TABLES
from torchzero_clip.engines.compiled.printers.triton import TritonPrinter, VectorKernel
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    Region,
    VectorMemory,
    VectorNode,
    touched,
)

ARGUMENTS = 128  # of a kernel; CUDA takes 4 KiB of them
Turn: TypeAlias = "list[VectorNode] | Launched"
Sources: TypeAlias = "dict[int, Tensor]"
"""The tensors of memories that are others in every step."""


class DeviceStep(CompiledStep):
    """A step on a GPU."""

    most: ClassVar[int] = 2**12

    def able(self, launch: Relaunch) -> bool:
        return not misfits(launch) and triton.native(launch.program) is not None

    def compile(
        self,
        memories: Sequence[VectorMemory],
        parts: Sequence[list[VectorNode | Launched]],
        kept: Collection[int],
    ) -> Collection[int] | None:
        self._turns = [turns(part, memories) for part in parts]
        every = [[x] if isinstance(x, Launched) else x for part in self._turns for x in part]
        printer = TritonPrinter(memories, every, kept)
        loops = zip([x for part in self._turns for x in part], printer.loops, strict=True)
        self._kernels = [None if isinstance(x, Launched) else printer.kernel(y) for x, y in loops]
        given = [len(kernel.signature) for kernel in self._kernels if kernel is not None]
        return printer.kept if max(given, default=0) <= ARGUMENTS else None

    def bind(self, sources: Sequence[Sequence[int]]) -> int:
        kernels, self._sources = iter(self._kernels), sources
        self._parts: list[list[Callable[[Sources], None]]] = []
        for part in self._turns:
            self._parts.append([])
            for x in part:
                kernel = next(kernels)
                if kernel is not None:
                    self._parts[-1].append(self._vectors(kernel))
                elif isinstance(x, Launched):
                    self._parts[-1].append(self._launched(x))
        del self._turns, self._kernels
        return sum(map(len, self._parts))

    def run(self, part: int, tensors: Sequence[Tensor]) -> None:
        given = dict(zip(self._sources[part], tensors, strict=True))
        for call in self._parts[part]:
            call(given)

    def _vectors(self, kernel: VectorKernel) -> Callable[[Sources], None]:
        """The call of a kernel."""
        function, own = kernel_of(kernel), self._room.own
        words = [x if isinstance(x, int) else self._room.address(*x) for x in kernel.words]
        table = array("q", words)

        def call(sources: Sources) -> None:
            given = [sources[m] for m in kernel.sources]
            launch(function, 1, TABLES.words(table, own), *given)

        return call

    def _launched(self, node: Launched) -> Callable[[Sources], None]:
        """The call of a list program, whose vectors and scalars are read where they lie."""
        room, again, numbers = self._room, node.launch, [float(x) for x in node.numbers]  # type: ignore[arg-type]
        call = triton.native(again.program)
        out = None if node.out is None else room.tensor(node.out)
        assert call is not None
        rows = [[(x, room.find(x)) for x in row] for row in (node.vectors, node.scalars)]

        def run(sources: Sources) -> None:
            given = [
                [t if t is not None else _view(sources[x.memory], x) for x, t in row]
                for row in rows
            ]
            now = again.launch(numbers, *given)
            call(now, now.sizes, out)

        return run


KERNELS: dict[str, TritonKernel] = {}
"""Kernels by their text."""


def kernel_of(kernel: VectorKernel) -> TritonKernel:
    """What is launched, one for all kernels of the same text."""
    made = TritonKernel("vectors", kernel.text, kernel.signature)
    return KERNELS.setdefault(kernel.text, made)


def _view(t: Tensor, place: Region) -> Tensor:
    return t.as_strided(place.shape, place.strides, t.storage_offset() + place.start)


# ---------------------------------------------------------------------- which kernel does what


def turns(nodes: Sequence[VectorNode | Launched], memories: Sequence[VectorMemory]) -> list[Turn]:
    """Nodes in as few kernels as can be, in turn with the launches.

    Between launch k - 1 and launch k is place k. A node may go to any place from the first that has
    what it reads to the last before somebody needs it.
    """
    marks = [_marks(node, memories) for node in nodes]
    first = _places(nodes, marks)
    count = sum([isinstance(node, Launched) for node in nodes])
    back = _places(list(reversed(nodes)), marks[::-1])
    last = [count - place for place in reversed(back)]
    launches = [node for node in nodes if isinstance(node, Launched)]
    left = [i for i, node in enumerate(nodes) if isinstance(node, VectorNode)]
    found: list[Turn] = []
    for place in range(count + 1):
        if any([last[i] == place for i in left]):
            some = [i for i in left if first[i] <= place]
            left = [i for i in left if first[i] > place]
            found.append([node for i in some if isinstance(node := nodes[i], VectorNode)])
        found += launches[place : place + 1]
    return found


def _places(
    nodes: Sequence[VectorNode | Launched], marks: Sequence[tuple[set[int], set[int]]]
) -> list[int]:
    """The first place that each node may go to."""
    wrote, read, found, launches = dict[int, int](), dict[int, int](), list[int](), 0
    for node, (reads, writes) in zip(nodes, marks, strict=True):
        place = max(
            [0, *[wrote.get(m, 0) for m in reads | writes], *[read.get(m, 0) for m in writes]]
        )
        found.append(place)
        if isinstance(node, Launched):
            launches += 1
            place = launches  # what follows it
        for m in reads:
            read[m] = max(read.get(m, 0), place)
        for m in writes:
            wrote[m] = max(wrote.get(m, 0), place)
    return found


def _marks(
    node: VectorNode | Launched, memories: Sequence[VectorMemory]
) -> tuple[set[int], set[int]]:
    """The memories that a node reads, and those that it writes."""
    reads, writes = touched(node.given, memories), touched([node.out], memories)
    if isinstance(node, Launched):  # and all that may lie where its lists do
        buffers = [b for b in node.launch.buffers if isinstance(b, Buffer)]
        held = storages([t for b in buffers for t in b.tensors])
        whole = len(buffers) == len(node.launch.buffers)
        for m, memory in enumerate(memories):
            lies = set() if memory.tensor is None else storages([memory.tensor])
            if lies & held or (memory.source is not None and not whole):
                writes.add(m)
    return reads, writes
