"""Device steps: the vectors between two launches as one kernel in Triton.

A vector waits for the launch whose numbers it takes, and others wait with it, so that there are as
few kernels as can be.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

from torch import Tensor

from torchzero_clip.core.tensors import storages
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.again.steps import CompiledStep, StepMemory, misfits
from torchzero_clip.engines.compiled.again.torch_calls import TorchCalls
from torchzero_clip.engines.compiled.printers import triton
from torchzero_clip.engines.compiled.printers.launches import TritonKernel, launch
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.tables import TABLES
from torchzero_clip.engines.compiled.printers.triton import TritonPrinter, VectorKernel
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    Region,
    Segment,
    VectorMemory,
    VectorNode,
    touched,
)

ARGUMENTS = 128  # of a kernel; CUDA takes 4 KiB of them
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
        segments: Sequence[Segment],
        between: TorchCalls,
        like: Tensor,
    ) -> int:
        turned = [turns(segment, memories) for segment in segments]
        every = [x for some in turned for x in some]
        printer = TritonPrinter(memories, every, between.read)
        kernels: list[Launched | VectorKernel] = [
            x[0] if isinstance(x[0], Launched) else printer.kernel(loops)
            for x, loops in zip(every, printer.loops, strict=True)
        ]
        given = [len(x.signature) for x in kernels if isinstance(x, VectorKernel)]
        if max(given, default=0) > ARGUMENTS:
            return 0
        self._own, self._sources = StepMemory(memories, printer.backed, like), between.memories
        calls = map(self._call, kernels)
        self._calls = [[next(calls) for _ in some] for some in turned]
        return len(every)

    def run(self, segment: int, tensors: Sequence[Tensor]) -> None:
        given = dict(zip(self._sources[segment], tensors, strict=True))
        for call in self._calls[segment]:
            call(given)

    def _call(self, kernel: Launched | VectorKernel) -> Callable[[Sources], None]:
        if isinstance(kernel, Launched):
            return self._launched(kernel)
        function, like = kernel_of(kernel), self._own.bytes
        words = [x if isinstance(x, int) else self._own.address(*x) for x in kernel.words]
        table = array("q", words)

        def call(sources: Sources) -> None:
            given = [sources[m] for m in kernel.sources]
            launch(function, 1, TABLES.words(table, like), *given)

        return call

    def _launched(self, node: Launched) -> Callable[[Sources], None]:
        """The call of a list program, whose vectors and scalars are read where they lie."""
        own, again, numbers = self._own, node.launch, [float(x) for x in node.numbers]  # type: ignore[arg-type]
        call = triton.native(again.program)
        out = None if node.out is None else own.tensor(node.out)
        assert call is not None
        rows = [[(x, own.find(x)) for x in row] for row in (node.vectors, node.scalars)]

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


def _view(t: Tensor, region: Region) -> Tensor:
    return t.as_strided(region.shape, region.strides, t.storage_offset() + region.start)


# ---------------------------------------------------------------------- which kernel does what


def turns(nodes: Segment, memories: Sequence[VectorMemory]) -> list[Segment]:
    """Nodes in as few kernels as can be, in turn with the launches, each of which is alone.

    Gap k lies before launch k. A node may go to any gap from the first that has what it reads to
    the last before somebody needs it.
    """
    marks = [_marks(node, memories) for node in nodes]
    launches = [node for node in nodes if isinstance(node, Launched)]
    first, back = _gaps(nodes, marks), _gaps(nodes[::-1], marks[::-1])
    last = [len(launches) - gap for gap in reversed(back)]
    left = [i for i, node in enumerate(nodes) if isinstance(node, VectorNode)]
    found: list[Segment] = []
    for gap in range(len(launches) + 1):
        if any([last[i] == gap for i in left]):
            found.append([nodes[i] for i in left if first[i] <= gap])
            left = [i for i in left if first[i] > gap]
        found += [[node] for node in launches[gap : gap + 1]]
    return found


def _gaps(nodes: Segment, marks: Sequence[tuple[set[int], set[int]]]) -> list[int]:
    """The first gap that each node may go to."""
    wrote, read, found, launches = dict[int, int](), dict[int, int](), list[int](), 0
    for node, (reads, writes) in zip(nodes, marks, strict=True):
        after = [wrote.get(m, 0) for m in reads | writes] + [read.get(m, 0) for m in writes]
        gap = max(after, default=0)
        found.append(gap)
        if isinstance(node, Launched):
            launches += 1
            gap = launches  # what follows it
        for m in reads:
            read[m] = max(read.get(m, 0), gap)
        for m in writes:
            wrote[m] = max(wrote.get(m, 0), gap)
    return found


def _marks(
    node: VectorNode | Launched, memories: Sequence[VectorMemory]
) -> tuple[set[int], set[int]]:
    """The memories that a node reads, and those that it writes."""
    reads, writes = touched(node.given, memories), touched([node.out], memories)
    if isinstance(node, Launched):  # and all that may lie where its lists do
        buffers = [b for b in node.launch.buffers if isinstance(b, Buffer)]
        lists = storages([t for b in buffers for t in b.tensors])
        whole = len(buffers) == len(node.launch.buffers)
        for m, memory in enumerate(memories):
            lies = set() if memory.tensor is None else storages([memory.tensor])
            if lies & lists or (memory.changes and not whole):
                writes.add(m)
    return reads, writes
