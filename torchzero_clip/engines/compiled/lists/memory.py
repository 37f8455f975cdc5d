"""Memory: the buffers that the values on a tape lie in."""

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

PARAMETERS, GRADIENTS = 0, 1
"""The ids of these buffers on every tape."""
WIDE, WIDE_GRADIENTS = -1, -2
"""Those of no memory: float32 of two halves, and of gradients in half precision."""
SPARES = 2  # buffers that last from step to step; more are made anew
Family: TypeAlias = "weakref.WeakKeyDictionary[Any, None]"
"""The tapes that share memory. Weak dictionaries keep the order in which their keys were added. The
order of a WeakSet depends on addresses, so two runs, or two ranks, would differ."""


class Cell:
    """Where the values of a list are: in a buffer, or at a node whose values are in no buffer yet.

    A list shares its cell with the lists that borrow it, so that they have one memory and see what
    is written to it.
    """

    __slots__ = ("__weakref__", "buffer", "value")

    def __init__(self, buffer: int | None, value: int) -> None:
        self.buffer, self.value = buffer, value


class Memory(Nodes):
    """The buffers of one bucket: parameters, gradients, state, and spare ones for other values."""

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
        self.runner, self.family, self.places, self.bucket = runner, family, list(places), key
        self.key = (key, self.places[0], len(places), params[0].device, grads[0].dtype)
        family[self] = None
        found = runner.buffers.find((self.key, "parameters"), params)
        self.buffers: list[Buffer] = [found, Buffer(grads)]
        self.lasting = {PARAMETERS, GRADIENTS}  # and state: no list of another value lies there
        self.spares: list[int] = []  # buffers for values that have none
        self.shown: set[int] = set()  # spare buffers that somebody may hold tensors or views of
        self.taken: set[int] | None = None  # buffers whose tensors the rule that runs has taken
        self.lasting_spares, self.state_dtype = 0, state_dtype(params[0])  # how many of them last
        self.sizes = list(map(Tensor.numel, params))
        self.cells: weakref.WeakKeyDictionary[Cell, None] = weakref.WeakKeyDictionary()
        self.skip = Skip()
        self._copies: list[tuple[list[Tensor], int]] = []
        self.interpreted = self.device.type == "cpu" and runner.backend == "triton"
        if runner.recorder is not None:
            self.read = _copy
            runner.recorder.open(self.buffers[GRADIENTS])
        self.elements: Elements | None = None  # of the parameters, where something is rounded
        self.beside = GRADIENTS  # what is kept beside the parameters, where something is

    def hold(self, tensors: Sequence[Tensor], name: Hashable = None) -> int:
        """The buffer of these tensors; those with a name are known from the step before."""
        for i, buffer in enumerate(self.buffers):
            if buffer.tensors[0] is tensors[0] and all(map(operator.is_, buffer.tensors, tensors)):
                return i
        recorder = self.runner.recorder
        if recorder is not None and (not all_here(tensors) or recorder.changing(tensors)):
            return self._copied(tensors)
        found = self.runner.buffers.find((self.key, name), tensors) if name else Buffer(tensors)
        self.buffers.append(found)
        return len(self.buffers) - 1

    def _copied(self, tensors: Sequence[Tensor]) -> int:
        """A buffer that lasts, into which a step that is written down copies these."""
        for known, i in self._copies:
            if len(known) == len(tensors) and all(map(operator.is_, known, tensors)):
                return i

        def like() -> list[Tensor]:
            params = self.buffers[PARAMETERS].tensors
            if len(tensors) != self.count or not same_shapes(tensors, params):
                return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
            rows = zip(params, tensors, strict=True)
            return [torch.empty_like(p, dtype=t.dtype) for p, t in rows]

        made = self.runner.memory(like)
        foreach("copy_", made, list(tensors))
        self._copies.append((list(tensors), self.hold(made)))
        return self._copies[-1][1]

    def lent(self, buffer: int) -> list[Tensor]:
        """The tensors of a buffer, to be written without a program."""
        if self.skip and buffer in self.lasting:
            self.skip.hold(self.buffers[buffer].tensors)
        return self.buffers[buffer].tensors

    # ------------------------------------------------------------------ spare buffers

    def cell(self, buffer: int | None = None, value: int = -1) -> Cell:
        """Make the cell of a list: for a buffer, or for a value that is in none yet."""
        made = Cell(buffer, value)
        self.cells[made] = None
        return made

    def show(self, buffer: int) -> None:
        """Note that somebody gets the tensors of a buffer, of which no list here may remain."""
        if buffer in self.spares:
            self.shown.add(buffer)
        if self.taken is not None:
            self.taken.add(buffer)

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Run a rule inside, and let memory that it has taken be reused after it.

        What the block returns must be a list of this tape by then.
        """
        before = set(self.shown), self.taken
        self.taken = set()
        yield
        self.shown, self.taken = before

    def _spare(self, dtype: torch.dtype, used: set[int | None]) -> int:
        """A buffer that no list lies in: one that lasts, or new memory."""
        for i in self.spares:
            if i not in used and self.buffers[i].dtype == dtype and self._free(i):
                return i
        params = self.buffers[PARAMETERS].tensors
        if self.device.type == "cpu" and self.lasting_spares < SPARES and dtype == self.state_dtype:
            key = self.bucket, self.lasting_spares
            like = partial(self.runner.workspaces.like, key, self.places, params)
            memory = self.runner.memory(like)
            self.spares.append(self.hold(memory, ("spare", self.lasting_spares)))
            self.lasting_spares += 1
            return self._spare(dtype, used)
        self.spares.append(self.fresh(dtype))
        return self.spares[-1]

    def fresh(self, dtype: torch.dtype) -> int:
        """A buffer of new memory."""
        params = self.buffers[PARAMETERS].tensors
        made = self.runner.memory(lambda: [torch.empty_like(t, dtype=dtype) for t in params])
        return self.hold(made)

    def _free(self, spare: int) -> bool:
        """Whether this memory is neither shown nor spanned by a list of another kind or tape."""
        others = [buffer for tape in self.family for buffer in tape.loose(self)]
        mine = self.buffers[spare]
        return spare not in self.shown and all([disjoint([mine, other]) for other in others])

    def loose(self, asked: Memory) -> list[Buffer]:
        """The buffers that may be in spare memory of `asked`, without its own spare ones."""
        found = {cell.buffer for cell in self.cells} - {None, PARAMETERS, GRADIENTS}
        found -= {WIDE, WIDE_GRADIENTS}
        if self is asked:
            found -= {*self.lasting, *self.spares}
        else:
            found |= self.shown
        return [self.buffers[i] for i in found if i is not None]


def _copy(x: Tensor) -> Tensor:
    """The number in a tensor, which is read when a program runs; it may have changed by then."""
    return x.detach().to(torch.float64, copy=True)
