"""The compiler of an optimizer: who does what its tapes noted, and what lasts from step to step."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from torchzero_clip.core.compiled import in_turns, missing
from torchzero_clip.core.kernel import Job
from torchzero_clip.core.native import Call, native
from torchzero_clip.core.norms import Measure, statistics

if TYPE_CHECKING:
    from torchzero_clip.core.tape import Tape

MOST = 1000  # homes that are remembered


class Home:
    """Tensors that a tape reads and writes, and what was found out about them."""

    def __init__(self, tensors: Sequence[Tensor], views: bool = False) -> None:
        self.tensors = list(tensors)
        self.places = _places(tensors)
        self.views = _views(tensors) if views else None  # where somebody may make them others
        self._flats: list[Tensor | None] | None = None
        self.shapes: list[torch.Size] | None = None  # of the parameters, once they are known to be
        self.sizes: list[int] = []  # of the parameters
        self.contiguous = all(map(Tensor.is_contiguous, tensors))

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, in the memory they had."""
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            return False
        if _places(tensors) != self.places:
            return False
        return self.views is None or _views(tensors) == self.views

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def flats(self) -> list[Tensor | None]:
        """The same memory as vectors that are no views of the tensors; None where it has gaps."""
        if self._flats is None:
            if self.contiguous:
                self._flats = [t.view(-1).data for t in self.tensors]
            else:
                self._flats = [_flat(t) for t in self.tensors]
        return self._flats


class Compiler:
    """Runs the tapes of one optimizer, and remembers where their tensors are."""

    way: Literal["native", "torch", "plain"] = "native"
    """What runs kernels on CPU: C++ of our own, torch's compiler, or nothing but their lines."""

    def __init__(self) -> None:
        self.devices: set[str] = set()  # that kernels can be compiled for
        self.homes: dict[Any, Home] = {}

    def check(self, device: torch.device) -> None:
        """Raise a sentence where nothing can compile for this kind of device."""
        kind = device.type
        if kind not in self.devices:
            why = missing(kind)
            if why is not None:
                raise RuntimeError(f"compile=True {why}; leave compile out to step without it")
            self.devices.add(kind)

    def home(self, key: Any, tensors: Sequence[Tensor], views: bool = False) -> Home:
        """What is known of tensors that come under this key in every step."""
        held = self.homes.get(key)
        if held is None or not held.same(tensors):
            if len(self.homes) >= MOST:  # parameters come and go
                self.homes.clear()
            held = self.homes[key] = Home(tensors, views)
        return held

    def run(
        self, tape: Tape, stores: Mapping[int, int], measured: tuple[Measure, int] | None = None
    ) -> Tensor | None:
        """Do what was noted on a tape, and store values in homes.

        Returns the statistics of the measured line, or None where the kernel cannot measure.
        """
        job = Job(tape, stores, measured)
        stats = None
        if self.way == "plain":
            stats = self._plainly(job, range(tape.count))
        elif (call := self._native(job)) is not None:
            odd = job.misfits()
            sizes = [0 if i in odd else n for i, n in enumerate(tape.sizes)] if odd else tape.sizes
            stats = call(job, sizes)
            if odd:
                some = self._plainly(job, odd)
                if stats is not None and some is not None:
                    stats[:, odd] = some
        elif measured is None:
            odd = [*job.misfits(), *[i for i, n in enumerate(tape.sizes) if n < 2]]
            in_turns(job, [i for i in range(tape.count) if i not in odd])
            self._plainly(job, odd)  # torch would compile those of one number apart
        elif stores:
            return self.run(tape, stores)
        for position in job.written:  # autograd looks at versions, kernels do not move them
            increment_version(job.homes[position].tensors)
        return stats

    def _native(self, job: Job) -> Call | None:
        """The kernel in C++, where there is one."""
        here = self.way == "native" and job.kernel.device.type == "cpu"
        return native(job.kernel) if here else None

    def _plainly(self, job: Job, some: Iterable[int]) -> Tensor | None:
        """Do it for these tensors, line by line."""
        values = [job.plainly(i) for i in some]
        if job.kernel.measured is None:
            return None
        return statistics([value for value in values if value is not None], job.kernel.measured[0])


def _places(tensors: Sequence[Tensor]) -> array[int]:
    return array("Q", list(map(Tensor.data_ptr, tensors)))


def _views(tensors: Sequence[Tensor]) -> list[Any]:
    return [(t.shape, t.stride()) for t in tensors]


def _flat(t: Tensor) -> Tensor | None:
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    t = t.permute(order)
    return t.view(-1).data if t.is_contiguous() else None
