"""Memory: the buffers in which a tape's values are, and the spare buffers for new values."""

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
"""The index for parameters in float32 that are stored as two halves; it is no buffer."""
WIDE_GRADIENTS = -2
"""The index for gradients of half precision in float32; it is no buffer."""
SPARES_KEPT = 2  # spare buffers that last from step to step, of a bucket
Family: TypeAlias = "weakref.WeakKeyDictionary[Any, None]"
"""The tapes that share memory. A dictionary keeps the order in which its keys were added. The order
of a WeakSet depends on addresses, so two runs, or two ranks, would differ."""


class Cell:
    """The place of a list's values: a buffer, or a value of a tape that is in no buffer yet.

    A list shares its cell with the lists that borrow it. So they have one memory, and they see what
    is written to it.
    """

    __slots__ = ("__weakref__", "buffer", "value")

    def __init__(self, buffer: int | None, value: int) -> None:
        self.buffer = buffer
        self.value = value


class Memory(Nodes):
    """The buffers of one bucket: parameters, gradients, state, and spare buffers for other values.

    Attributes:
        buffers: All buffers of the tape; code refers to a buffer by its index.
        lasting: The buffers of parameters, gradients and state, which no other list may use.
        spares: The buffers for new values.
        shown: The spare buffers whose tensors, or views of them, other code may have.
        taken: The buffers whose tensors the running rule has read; None outside of a rule.
        cells: The cells of all lists on this tape that still exist.
        elements: The places of elements in whole parameters, if stochastic rounding needs them.
        beside: The buffer that completes low-precision parameters: lower halves or Kahan sums.
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
        """Return the buffer of these tensors; a buffer with a name is kept from step to step."""
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
        """Return a buffer that lasts, into which the recorded step copies these tensors."""
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
        """Return the tensors of a buffer, which the caller may write."""
        tensors = self.buffers[buffer].tensors
        if self.skip and buffer in self.lasting:
            self.skip.hold(tensors)
        return tensors

    # ------------------------------------------------------------------ spare buffers

    def cell(self, buffer: int | None = None, value: int = -1) -> Cell:
        """Return a new cell for a list: of a buffer, or of a value that is in no buffer yet."""
        cell = Cell(buffer, value)
        self.cells[cell] = None
        return cell

    def show(self, buffer: int) -> None:
        """Note that the caller gets the tensors of a buffer, and may keep them without a list."""
        if buffer in self.spares:
            self.shown.add(buffer)
        if self.taken is not None:
            self.taken.add(buffer)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Run a rule in the block; memory that the rule has read may be reused after it.

        At the end of the block, the result of the rule must be a list of this tape.
        """
        shown = set(self.shown)
        taken = self.taken
        self.taken = set()
        yield
        self.shown = shown
        self.taken = taken

    def _spare(self, dtype: torch.dtype, used: set[int | None]) -> int:
        """Return a spare buffer that no list uses, from an earlier step if possible."""
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
        """Return a buffer of new memory."""
        params = self.buffers[PARAMETERS].tensors
        tensors = self.runner.memory(lambda: [torch.empty_like(t, dtype=dtype) for t in params])
        return self.hold(tensors)

    def _free(self, spare: int) -> bool:
        """Return whether a spare buffer is not shown, and shares no memory with other lists."""
        if spare in self.shown:
            return False
        others = [buffer for tape in self.family for buffer in tape.loose(self)]
        buffer = self.buffers[spare]
        return all([disjoint([buffer, other]) for other in others])

    def loose(self, asked: Memory) -> list[Buffer]:
        """Return the buffers that may overlap spare buffers of the tape `asked`.

        For its own tape, they are the buffers that are neither lasting nor spare.
        """
        loose = {cell.buffer for cell in self.cells} - {None, PARAMETERS, GRADIENTS}
        loose -= {WIDE, WIDE_GRADIENTS}
        if self is asked:
            loose -= {*self.lasting, *self.spares}
        else:
            loose |= self.shown
        return [self.buffers[i] for i in loose if i is not None]


def _copy(x: Tensor) -> Tensor:
    """Return a copy of a number, which a recorded step reads when it is replayed."""
    return x.detach().to(torch.float64, copy=True)
