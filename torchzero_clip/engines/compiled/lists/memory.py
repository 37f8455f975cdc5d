"""Memory: the buffers that store the values of a tape, and the spare buffers for new values."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.formats.stochastic import Elements
from torchzero_clip.core.skip import Skip
from torchzero_clip.core.state import state_dtype
from torchzero_clip.core.tensor_kinds import all_here, same_shapes
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.engines.buffers import Buffer, disjoint
from torchzero_clip.engines.compiled.lists.nodes import Nodes
from torchzero_clip.engines.compiled.lists.runner import Runner

PARAMETERS = 0
"""The index of the buffer of parameters, on every tape."""
GRADIENTS = 1
"""The index of the buffer of gradients, on every tape."""
WIDE = -1
"""A placeholder index for parameters whose float32 values are stored as two halves.

No buffer has this index."""
WIDE_GRADIENTS = -2
"""A placeholder index for the float32 values of half-precision gradients.

No buffer has this index."""
SPARES_KEPT = 2  # spare buffers that last from step to step, of a bucket
Family: TypeAlias = "weakref.WeakKeyDictionary[Any, None]"
"""The tapes that share memory. They are the keys of a dictionary, because a dictionary keeps the
order in which keys were added. The order of a WeakSet depends on addresses, so the order would
differ between two runs or two ranks."""


class Cell:
    """A reference to the values of a list: a buffer, or a recorded value that is not in a buffer.

    A list shares its cell with the lists that borrow it. So all these lists have the same memory,
    and a write to this memory changes all of them.
    """

    __slots__ = ("__weakref__", "buffer", "value")

    def __init__(self, buffer: int | None, value: int) -> None:
        self.buffer = buffer
        self.value = value


class Memory(Nodes):
    """The buffers of one bucket: parameters, gradients, state, and spare buffers for other values.

    Attributes:
        buffers: All buffers of the tape. Code refers to a buffer by its index.
        lasting: The indices of the buffers of parameters, gradients and state. No other list may
            use these buffers.
        spares: The indices of the buffers for new values.
        shown: The indices of the spare buffers whose tensors other code may hold, also as views.
        taken: The indices of the buffers whose tensors the running rule has read. None outside of a
            rule.
        cells: The cells of all lists on this tape that still exist.
        elements: The places of elements in whole parameters. None unless stochastic rounding needs
            the places.
        beside: The index of the buffer that completes low-precision parameters. It has lower halves
            or Kahan sums.
    """

    def __init__(
        self,
        runner: Runner,
        key: Hashable,
        places: Sequence[int],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        family: Family,
    ) -> None:
        super().__init__(len(params), params[0].device)
        self.runner = runner
        self.family = family
        self.places = list(places)
        self.bucket = key
        self.key = (key, self.places[0], len(places), params[0].device, grads[0].dtype)
        family[self] = None
        parameters = runner.buffers.find((self.key, "parameters"), params)
        self.buffers: list[Buffer] = [parameters, Buffer(grads)]
        self.lasting = {PARAMETERS, GRADIENTS}
        self.spares: list[int] = []
        self.shown: set[int] = set()
        self.taken: set[int] | None = None
        self.lasting_spares = 0  # the number of spare buffers that last from step to step
        self.state_dtype = state_dtype(params[0])
        self.sizes = list(map(Tensor.numel, params))
        self.cells: weakref.WeakKeyDictionary[Cell, None] = weakref.WeakKeyDictionary()
        self.skip = Skip()
        self._copies: list[tuple[list[Tensor], int]] = []
        self.interpreted = self.device.type == "cpu" and runner.backend == "triton"
        if runner.recorder is not None:
            self.read = _copy
            runner.recorder.open(self.buffers[GRADIENTS])
        self.elements: Elements | None = None
        self.beside = GRADIENTS

    def hold(self, tensors: Sequence[Tensor], name: Hashable = None) -> int:
        """Return the index of the buffer of these tensors. A named buffer is kept between steps."""
        for i, buffer in enumerate(self.buffers):
            if buffer.tensors[0] is tensors[0] and all(map(operator.is_, buffer.tensors, tensors)):
                return i
        recorder = self.runner.recorder
        if recorder is not None and (not all_here(tensors) or recorder.changing(tensors)):
            return self._copied(tensors)
        if name:
            self.buffers.append(self.runner.buffers.find((self.key, name), tensors))
        else:
            self.buffers.append(Buffer(tensors))
        return len(self.buffers) - 1

    def _copied(self, tensors: Sequence[Tensor]) -> int:
        """Return a permanent buffer, into which the recorded step copies these tensors."""
        for known, i in self._copies:
            if len(known) == len(tensors) and all(map(operator.is_, known, tensors)):
                return i

        def like() -> list[Tensor]:
            params = self.buffers[PARAMETERS].tensors
            if len(tensors) != self.count or not same_shapes(tensors, params):
                return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
            rows = zip(params, tensors, strict=True)
            return [torch.empty_like(p, dtype=t.dtype) for p, t in rows]

        copies = self.runner.memory(like)
        foreach("copy_", copies, list(tensors))
        buffer = self.hold(copies)
        self._copies.append((list(tensors), buffer))
        return buffer

    def lent(self, buffer: int) -> list[Tensor]:
        """Return the tensors of a buffer. The caller may write to these tensors."""
        tensors = self.buffers[buffer].tensors
        if self.skip and buffer in self.lasting:
            self.skip.hold(tensors)
        return tensors

    # ------------------------------------------------------------------ spare buffers

    def cell(self, buffer: int | None = None, value: int = -1) -> Cell:
        """Return a new cell for a buffer, or for a value that is not in a buffer yet."""
        cell = Cell(buffer, value)
        self.cells[cell] = None
        return cell

    def show(self, buffer: int) -> None:
        """Note that other code has received the tensors of a buffer, and may keep the tensors."""
        if buffer in self.spares:
            self.shown.add(buffer)
        if self.taken is not None:
            self.taken.add(buffer)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Return a context manager in which a rule runs.

        After the block, the tape may reuse memory that the rule has read. At the end of the block,
        the result of the rule must be a list of this tape.
        """
        shown = set(self.shown)
        taken = self.taken
        self.taken = set()
        yield
        self.shown = shown
        self.taken = taken

    def _spare(self, dtype: torch.dtype, used: set[int | None]) -> int:
        """Return a spare buffer that no list uses. Use one from an earlier step if possible."""
        for i in self.spares:
            if i not in used and self.buffers[i].dtype == dtype and self._free(i):
                return i
        if (
            self.device.type != "cpu"
            or self.lasting_spares == SPARES_KEPT
            or dtype != self.state_dtype
        ):
            self.spares.append(self.fresh(dtype))
            return self.spares[-1]
        params = self.buffers[PARAMETERS].tensors
        key = self.bucket, self.lasting_spares
        like = partial(self.runner.workspaces.like, key, self.places, params)
        memory = self.runner.memory(like)
        self.spares.append(self.hold(memory, ("spare", self.lasting_spares)))
        self.lasting_spares += 1
        return self._spare(dtype, used)  # lists of another tape may use it

    def fresh(self, dtype: torch.dtype) -> int:
        """Allocate a buffer, and return its index."""
        params = self.buffers[PARAMETERS].tensors
        tensors = self.runner.memory(lambda: [torch.empty_like(t, dtype=dtype) for t in params])
        return self.hold(tensors)

    def _free(self, spare: int) -> bool:
        """Return whether a spare buffer may be used for new values.

        Other code must not hold tensors of the buffer. The buffer must not share memory with other
        lists.
        """
        if spare in self.shown:
            return False
        others = [buffer for tape in self.family for buffer in tape.loose(self)]
        buffer = self.buffers[spare]
        return all([disjoint([buffer, other]) for other in others])

    def loose(self, asked: Memory) -> list[Buffer]:
        """Return the buffers that may overlap spare buffers of the tape `asked`.

        If `asked` is this tape, they are the buffers that are neither lasting nor spare.
        """
        loose = {cell.buffer for cell in self.cells} - {None, PARAMETERS, GRADIENTS}
        loose -= {WIDE, WIDE_GRADIENTS}
        if self is asked:
            loose -= {*self.lasting, *self.spares}
        else:
            loose |= self.shown
        return [self.buffers[i] for i in loose if i is not None]


def _copy(x: Tensor) -> Tensor:
    """Return a copy of a number as a tensor. A replayed step reads the number from this tensor."""
    return x.detach().to(torch.float64, copy=True)
