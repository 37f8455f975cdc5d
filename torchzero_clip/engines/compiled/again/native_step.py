"""Native steps: launches and the vectors between them as one library in C++."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.again.steps import CompiledStep, misfits
from torchzero_clip.engines.compiled.printers.build import function
from torchzero_clip.engines.compiled.printers.cpp import CppPrinter, kernel_of, rows_of, threads_for
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.vectors import Launched, VectorMemory, VectorNode

FLAGS = "-std=c++17 -O1 -march=native -fno-math-errno -ffp-contract=off -fno-strict-aliasing"
FLAGS += " -fPIC -shared"


class NativeStep(CompiledStep):
    """A step on CPU.

    Attributes:
        text: The source of its library.
    """

    most: ClassVar[int] = 2**14

    def able(self, launch: Relaunch) -> bool:
        here = launch.program.device.type == "cpu"
        return here and not misfits(launch) and kernel_of(launch.program) is not None

    def compile(
        self,
        memories: Sequence[VectorMemory],
        parts: Sequence[list[VectorNode | Launched]],
        kept: Collection[int],
    ) -> Collection[int] | None:
        self._printer, self._memories = CppPrinter(memories, parts, kept), memories
        self.text = self._printer.text()
        self._kernel = function(self.text, FLAGS)
        if self._kernel is None:
            return None
        self._kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong]
        return self._printer.kept

    def bind(self, sources: Sequence[Sequence[int]]) -> int:
        integers, self._pointers = self._printer.integers, self._printer.pointers
        self._held: list[array[Any]] = []
        self._d = array("q", [n if isinstance(n, int) else 0 for n in integers])
        self._counts = [(i, x[0]) for i, x in enumerate(integers) if type(x) is tuple]
        self._p = array("Q", [0] * len(self._pointers))
        self._lists: list[tuple[array[int], int, tuple[int, ...]]] = []
        for i, (whose, which) in enumerate(self._pointers):
            if whose == "memory":
                self._p[i] = self._address(which)
            elif which == "kernel":
                self._p[i] = _address_of(kernel_of(whose.program))
            elif which == "sizes":
                self._p[i] = self._hold(array("q", whose.sizes))
            elif which == "rows":
                self._p[i] = self._hold(rows_of(whose.rows))
            elif which == "lists":
                self._p[i] = self._hold(self._addresses(whose))
        self._given = self._p.buffer_info()[0], self._d.buffer_info()[0]
        self._slots = [[self._pointers.index(("memory", m)) for m in row] for row in sources]
        self._share()
        del self._printer, self._memories  # they would hold the graph
        return len(sources)

    def begin(self) -> None:
        if torch.get_num_threads() != self._threads:
            self._share()
        for lists, i, key in self._lists:
            lists[i] = self._gradients[key].addresses.buffer_info()[0]

    def run(self, part: int, tensors: Sequence[Tensor]) -> None:
        for slot, t in zip(self._slots[part], tensors, strict=True):
            self._p[slot] = t.data_ptr()
        self._kernel(*self._given, part)

    # ------------------------------------------------------------------ tables

    def _hold(self, table: array[Any]) -> int:
        self._held.append(table)
        return table.buffer_info()[0]

    def _address(self, m: int) -> int:
        rows = self._memories[m].rows
        if not rows:
            return self._room.address(m)
        return self._hold(array("Q", [self._room.address(i, at) for i, at in rows]))

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
        self._parts = []
        for i, (whose, which) in enumerate(self._pointers):
            if which == "parts":
                parts = array("d", [0.0] * whose.width * threads_for(whose.sizes))
                self._parts.append(parts)
                self._p[i] = parts.buffer_info()[0]


def _address_of(kernel: Any) -> int:
    return ctypes.cast(kernel, ctypes.c_void_p).value or 0
