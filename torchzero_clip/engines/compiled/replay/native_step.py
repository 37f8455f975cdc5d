"""Native steps: launches and the vectors between them as one library in C++."""

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
    """A step on CPU."""

    most: ClassVar[int] = 2**14

    def able(self, launch: Relaunch) -> bool:
        here = launch.program.device.type == "cpu"
        return here and not misfits(launch) and kernel_of(launch.program) is not None

    def compile(
        self,
        memories: Sequence[VectorMemory],
        segments: Sequence[Sequence[Segment]],
        between: TorchCalls,
        like: Tensor,
    ) -> int:
        self._first = [0, *itertools.accumulate(map(len, segments))]  # turn of each segment
        printer = CppPrinter(memories, [*itertools.chain(*segments)], between.read)
        self.text = printer.text()
        self._kernel = function(self.text, FLAGS)
        if self._kernel is None:
            return 0
        self._kernel.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_longlong] * 2]
        self._own = StepMemory(memories, printer.backed, like)
        self._alive: list[array[Any]] = []
        self._lists: list[tuple[array[int], int, tuple[int, ...]]] = []
        integers, pointers = printer.integers, printer.pointers
        self._d = array("q", [n if isinstance(n, int) else 0 for n in integers])
        self._p = array("Q", [self._pointer(x, which, memories) for x, which in pointers])
        self._tables = self._p.buffer_info()[0], self._d.buffer_info()[0]
        self._slots = [[pointers.index(("memory", m)) for m in row] for row in between.memories]
        self._counts = [(i, x[0]) for i, x in enumerate(integers) if type(x) is tuple]
        self._sums = [(i, x) for i, (x, which) in enumerate(pointers) if which == "found"]
        self._share()
        return len(segments)

    def begin(self) -> None:
        if torch.get_num_threads() != self._threads:
            self._share()
        for lists, i, key in self._lists:
            lists[i] = self._gradients[key].addresses.buffer_info()[0]

    def run(self, segment: int, tensors: Sequence[Tensor], turn: int | None = None) -> None:
        begin, end = self._first[segment : segment + 2]
        for slot, t in zip(self._slots[segment], tensors, strict=True):
            self._p[slot] = t.data_ptr()
        turns = (begin, end) if turn is None else (begin + turn, begin + turn + 1)
        self._kernel(*self._tables, *turns)

    # ------------------------------------------------------------------ tables

    def _pointer(self, whose: Any, which: Any, memories: Sequence[VectorMemory]) -> int:
        """What stands in the table of pointers; 0 for what changes, and is put there later."""
        if whose == "memory":
            rows = memories[which].rows
            table = array("Q", [self._own.address(i, at) for i, at in rows])
            return self._hold(table) if rows else self._own.address(which)
        if which == "kernel":
            return ctypes.cast(kernel_of(whose.program), ctypes.c_void_p).value or 0
        if which == "sizes":
            return self._hold(array("q", whose.sizes))
        if which == "rows":
            return self._hold(rows_of(whose.rows))
        return self._hold(self._addresses(whose)) if which == "lists" else 0

    def _hold(self, table: array[Any]) -> int:
        self._alive.append(table)
        return table.buffer_info()[0]

    def _addresses(self, launch: Relaunch) -> array[int]:
        """The addresses of the lists of a launch, those of gradients to be filled in."""
        lists = array("Q", [0] * len(launch.buffers))
        for i, buffer in enumerate(launch.buffers):
            if isinstance(buffer, Buffer):
                lists[i] = buffer.addresses.buffer_info()[0]
            else:
                self._lists.append((lists, i, buffer))
        return lists

    def _share(self) -> None:
        """Share the tensors of launches among torch's threads, as many as they are now."""
        self._threads = torch.get_num_threads()
        for i, launch in self._counts:
            self._d[i] = threads_for(launch.sizes)
        self._found = [array("d", [0.0] * x.width * threads_for(x.sizes)) for _, x in self._sums]
        for (i, _), found in zip(self._sums, self._found, strict=True):
            self._p[i] = found.buffer_info()[0]
