"""Device steps: run a recorded step on GPU as a few Triton kernels.

`DeviceStep` compiles each stage of vector nodes to one Triton kernel. List programs already have
kernels, and `DeviceStep` launches these kernels. A kernel reads sizes and addresses from a table in
GPU memory. So models that differ only in tensor sizes share kernels.
"""

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
from torchzero_clip.engines.compiled.printers.vectors import Launched, Segment, VectorMemory
from torchzero_clip.engines.compiled.replay.compiled_step import (
    CompiledStep,
    StepMemory,
    misfits,
    view,
)
from torchzero_clip.engines.compiled.replay.torch_calls import TorchCalls

MAX_ARGUMENTS = 128  # of a kernel: CUDA allows 4 KiB of arguments
Sources: TypeAlias = "dict[int, Tensor]"
"""The tensors that are new in every step, by the index of their memory."""


class DeviceStep(CompiledStep):
    """A recorded step that runs on GPU, with one kernel for each stage."""

    max_elements: ClassVar[int] = 2**12

    def supports(self, launch: Relaunch) -> bool:
        return not misfits(launch) and triton.native(launch.program) is not None

    def compile(
        self,
        memories: Sequence[VectorMemory],
        segments: Sequence[Sequence[Segment]],
        between: TorchCalls,
        like: Tensor,
    ) -> int:
        all_stages = [stage for segment in segments for stage in segment]
        printer = TritonPrinter(memories, all_stages, between.read)
        kernels: list[Launched | VectorKernel] = [
            stage[0] if isinstance(stage[0], Launched) else printer.kernel(loops)
            for stage, loops in zip(all_stages, printer.loops, strict=True)
        ]
        vector_kernels = [x for x in kernels if isinstance(x, VectorKernel)]
        if max([len(x.signature) for x in vector_kernels], default=0) > MAX_ARGUMENTS:
            return 0
        self.text = "\n".join([x.text for x in vector_kernels])
        self._own = StepMemory(memories, printer.backed, like)
        calls = map(self._call, kernels)
        self._calls = [[next(calls) for _ in segment] for segment in segments]
        return len(all_stages)

    def run(self, segment: int, tensors: Sequence[Tensor], stage: int | None = None) -> None:
        sources = dict(zip(self._changing[segment], tensors, strict=True))
        calls = self._calls[segment]
        for call in calls if stage is None else [calls[stage]]:
            call(sources)

    def _call(self, kernel: Launched | VectorKernel) -> Callable[[Sources], None]:
        """Return a function that runs one stage on the tensors that are new in every step."""
        if isinstance(kernel, Launched):
            return self._launched(kernel)
        function = kernel_of(kernel)
        like = self._own.bytes
        words = [x if isinstance(x, int) else self._own.address(*x) for x in kernel.words]
        table = array("q", words)

        def call(sources: Sources) -> None:
            tensors = [sources[m] for m in kernel.sources]
            launch(function, 1, TABLES.words(table, like), *tensors)

        return call

    def _launched(self, node: Launched) -> Callable[[Sources], None]:
        """Return a function that launches a list program with its numbers, vectors and scalars."""
        own = self._own
        relaunch = node.launch
        numbers = [float(x) for x in node.numbers]  # type: ignore[arg-type]
        call = triton.native(relaunch.program)
        out = None if node.out is None else own.tensor(node.out)
        assert call is not None
        operands = [[(x, own.find(x)) for x in row] for row in (node.vectors, node.scalars)]

        def run(sources: Sources) -> None:
            vectors, scalars = [
                [t if t is not None else view(sources[x.memory], x) for x, t in row]
                for row in operands
            ]
            now = relaunch.launch(numbers, vectors, scalars)
            call(now, now.sizes, out)

        return run


KERNELS: dict[str, TritonKernel] = {}
"""All Triton kernels that were made, by their source code."""


def kernel_of(kernel: VectorKernel) -> TritonKernel:
    """Return the Triton kernel of a vector kernel. Vector kernels with equal code share one."""
    new = TritonKernel("vectors", kernel.text, kernel.signature)
    return KERNELS.setdefault(kernel.text, new)
