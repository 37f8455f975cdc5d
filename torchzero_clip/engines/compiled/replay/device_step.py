"""Device steps: the vectors between two launches as one kernel in Triton."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

from torch import Tensor

from torchzero_clip.engines.compiled.printers import triton
from torchzero_clip.engines.compiled.printers.launches import TritonKernel, launch
from torchzero_clip.engines.compiled.printers.pointer_tables import TABLES
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.triton import TritonPrinter, VectorKernel
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    Segment,
    VectorMemory,
)
from torchzero_clip.engines.compiled.replay.compiled_step import (
    CompiledStep,
    StepMemory,
    misfits,
    view,
)
from torchzero_clip.engines.compiled.replay.torch_calls import TorchCalls

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
        segments: Sequence[Sequence[Segment]],
        between: TorchCalls,
        like: Tensor,
    ) -> int:
        every = [some for segment in segments for some in segment]
        printer = TritonPrinter(memories, every, between.read)
        kernels: list[Launched | VectorKernel] = [
            x[0] if isinstance(x[0], Launched) else printer.kernel(loops)
            for x, loops in zip(every, printer.loops, strict=True)
        ]
        pages = [x for x in kernels if isinstance(x, VectorKernel)]
        if max([len(x.signature) for x in pages], default=0) > ARGUMENTS:
            return 0
        self.text = "\n".join([x.text for x in pages])
        self._own = StepMemory(memories, printer.backed, like)
        calls = map(self._call, kernels)
        self._calls = [[next(calls) for _ in segment] for segment in segments]
        return len(every)

    def run(self, segment: int, tensors: Sequence[Tensor], turn: int | None = None) -> None:
        given, calls = (
            dict(zip(self._changing[segment], tensors, strict=True)),
            self._calls[segment],
        )
        for call in calls if turn is None else [calls[turn]]:
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
                [t if t is not None else view(sources[x.memory], x) for x, t in row] for row in rows
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
