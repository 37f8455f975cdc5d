"""Native steps: run a recorded step on CPU as one C++ library.

`NativeStep` compiles all segments of a step to one C++ function. The arguments of this function are
a table of pointers, a table of integers, and the range of stages to run. `NativeStep` makes the
tables once. Before each replay it updates only the addresses that have changed.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.build import function
from torchzero_clip.engines.compiled.printers.cpp import CppPrinter, kernel_of, rows_of, threads_for
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.vectors import Segment, VectorMemory
from torchzero_clip.engines.compiled.replay.compiled_step import CompiledStep, StepMemory, misfits
from torchzero_clip.engines.compiled.replay.torch_calls import TorchCalls

FLAGS = "-std=c++17 -O1 -march=native -fno-math-errno -ffp-contract=off -fno-strict-aliasing"
FLAGS += " -fPIC -shared"


class NativeStep(CompiledStep):
    """A recorded step that runs on CPU, with one native call for each segment."""

    max_elements: ClassVar[int] = 2**14

    def supports(self, launch: Relaunch) -> bool:
        on_cpu = launch.program.device.type == "cpu"
        return on_cpu and not misfits(launch) and kernel_of(launch.program) is not None

    def compile(
        self,
        memories: Sequence[VectorMemory],
        segments: Sequence[Sequence[Segment]],
        between: TorchCalls,
        like: Tensor,
    ) -> int:
        self._first_stages = [0, *itertools.accumulate(map(len, segments))]  # of each segment
        printer = CppPrinter(memories, [*itertools.chain(*segments)], between.read)
        self.text = printer.text()
        self._kernel = function(self.text, FLAGS)
        if self._kernel is None:
            return 0
        self._kernel.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_longlong] * 2]
        self._own = StepMemory(memories, printer.backed, like)
        self._alive: list[array[Any]] = []  # arrays that the table of pointers refers to
        # where to write the address of a gradient buffer's addresses: an array, an index, the key
        self._gradient_slots: list[tuple[array[int], int, tuple[int, ...]]] = []
        integers = printer.integers
        pointers = printer.pointers
        self._integers = array("q", [n if isinstance(n, int) else 0 for n in integers])
        self._pointers = array("Q", [self._pointer(x, kind, memories) for x, kind in pointers])
        self._tables = self._pointers.buffer_info()[0], self._integers.buffer_info()[0]
        self._slots = [[pointers.index(("memory", m)) for m in row] for row in between.memories]
        self._thread_counts = [(i, x[0]) for i, x in enumerate(integers) if type(x) is tuple]
        self._statistics = [(i, x) for i, (x, kind) in enumerate(pointers) if kind == "found"]
        self._share()
        return len(segments)

    def begin(self) -> None:
        if torch.get_num_threads() != self._threads:
            self._share()
        for lists, i, key in self._gradient_slots:
            lists[i] = self._gradients[key].addresses.buffer_info()[0]

    def run(self, segment: int, tensors: Sequence[Tensor], stage: int | None = None) -> None:
        begin, end = self._first_stages[segment : segment + 2]
        for slot, t in zip(self._slots[segment], tensors, strict=True):
            self._pointers[slot] = t.data_ptr()
        if stage is not None:
            begin += stage
            end = begin + 1
        self._kernel(*self._tables, begin, end)

    # ------------------------------------------------------------------ tables

    def _pointer(self, owner: Any, kind: Any, memories: Sequence[VectorMemory]) -> int:
        """Return an entry of the table of pointers, or 0 if the entry is filled in later.

        Args:
            owner: "memory" for a pointer to a memory of the step. Otherwise the launch that uses
                the pointer.
            kind: The index of the memory, or the name of the pointer in the launch.
            memories: All memory ranges that the step uses.
        """
        if owner == "memory":
            rows = memories[kind].rows
            if not rows:
                return self._own.address(kind)
            return self._hold(array("Q", [self._own.address(m, start) for m, start in rows]))
        if kind == "kernel":
            return ctypes.cast(kernel_of(owner.program), ctypes.c_void_p).value or 0
        if kind == "sizes":
            return self._hold(array("q", owner.sizes))
        if kind == "rows":
            return self._hold(rows_of(owner.rows))
        return self._hold(self._addresses(owner)) if kind == "lists" else 0

    def _hold(self, table: array[Any]) -> int:
        """Keep an array alive as long as this step, and return the address of the array."""
        self._alive.append(table)
        return table.buffer_info()[0]

    def _addresses(self, launch: Relaunch) -> array[int]:
        """Return the address of each address list of a launch. Gradients are filled in later."""
        lists = array("Q", [0] * len(launch.buffers))
        for i, buffer in enumerate(launch.buffers):
            if isinstance(buffer, Buffer):
                lists[i] = buffer.addresses.buffer_info()[0]
            else:
                self._gradient_slots.append((lists, i, buffer))
        return lists

    def _share(self) -> None:
        """Set the number of threads of each launch, based on PyTorch's current number of threads.

        If a launch measures statistics, each of its threads gets separate memory for partial sums.
        """
        self._threads = torch.get_num_threads()
        for i, launch in self._thread_counts:
            self._integers[i] = threads_for(launch.sizes)
        self._partial_sums: list[array[float]] = []
        for i, launch in self._statistics:
            sums = array("d", [0.0] * launch.width * threads_for(launch.sizes))
            self._partial_sums.append(sums)
            self._pointers[i] = sums.buffer_info()[0]
