"""Steps: a step that was written down, as few native calls over tables of pointers.

Launches and the vectors between them are native; where torch's operators stand between, a function
calls the parts and these in turn. From step to step only the addresses of gradients change, and of
what torch makes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.fx import Graph

from torchzero_clip.core.tensors import addresses
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.again.graphs import StepGraph
from torchzero_clip.engines.compiled.again.lowering import Lowering
from torchzero_clip.engines.compiled.again.rest import Rest
from torchzero_clip.engines.compiled.printers.program import Relaunch
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    Region,
    VectorMemory,
    VectorNode,
)

LONGEST = 2000  # nodes of a step that is compiled: to compile more takes too long
LINE = 64  # bytes: where memory of a step's own begins


class CompiledStep:
    """A step as a native call, or as several with torch's between.

    Args:
        graph, leaves: The step that was written down.
        changing: The leaves that are others in every step.
        gradients: The buffers of gradients of the step on its way, by places.

    Attributes:
        lacking: The operators that stay calls of torch.
        calls: How many native calls it is.
        works: Whether it could be compiled.
        graph: That of the step, where it is captured.
    """

    most: ClassVar[int]
    """How many entries a node makes; with more of them torch's own calls are faster."""

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        changing: Sequence[Tensor],
        gradients: dict[tuple[int, ...], Buffer],
    ) -> None:
        here = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        home = next((t.device for t in [*changing, *here]), torch.device("cpu"))
        made = Lowering(graph, leaves, changing, home, self.able, self.most)
        self.lacking, self._gradients = made.lacking, gradients
        self.graph: StepGraph | None = None
        parts = [part for part in made.parts if isinstance(part, list)]
        nodes = [node for part in parts for node in part]
        self._launches = [node.launch for node in nodes if isinstance(node, Launched)]
        rest = Rest(made, leaves, graph, changing)
        self.works = 0 < len(nodes) <= LONGEST
        kept = self.compile(made.memories, parts, rest.kept) if self.works else None
        if kept is None:
            self.works, self.calls = False, 0
            return
        like = next(t for t in [*changing, *here] if t.device == home)
        self._room = Room(made.memories, kept, like)
        self.calls = self.bind(rest.memories)
        self._alone, self._rest = None, None
        if len(made.parts) == 1:
            places = {id(leaf): i for i, leaf in enumerate(changing)}
            sources = [leaves[i] for i in rest.sources_of(0)]
            self._alone = [places[id(leaf)] for leaf in sources]
        else:
            self._rest = rest.function(lambda node: self._room.tensor(made.regions[node]))
        self._remember(nodes, made.memories)
        self._room.close()

    def _remember(
        self, nodes: Sequence[VectorNode | Launched], memories: Sequence[VectorMemory]
    ) -> None:
        """Note what it writes, and whether all lies in memory as programs need it."""
        written = [node.out.memory for node in nodes if type(node) is VectorNode]
        held = [memories[m].tensor for m in dict.fromkeys(written)]
        self._written = [t for t in held if t is not None]
        self._written_grads: list[tuple[int, ...]] = []
        for launch in self._launches:
            for i in {i for i, _ in launch.program.stores}:
                buffer = launch.buffers[i]
                if isinstance(buffer, Buffer):
                    self._written += buffer.tensors
                else:
                    self._written_grads.append(buffer)
        fixed = [b for x in self._launches for b in x.buffers if isinstance(b, Buffer)]
        in_order = [x.elements is None or x.elements.contiguous for x in self._launches]
        self._dense = all([b.contiguous for b in fixed]) and all(in_order)

    def __call__(self, changing: Sequence[Tensor]) -> bool:
        """Do the step, unless the gradients do not lie as programs need them.

        `changing` stand in the place of those that it was written down with.
        """
        buffers = list(self._gradients.values())
        dense = self._dense and all([buffer.contiguous for buffer in buffers])
        if not dense and any(map(misfits, self._launches)):
            return False
        if not dense and not all([t.is_contiguous() for t in changing]):
            return False
        written = self._written
        for key in self._written_grads:
            written = written + self._gradients[key].tensors
        increment_version(written)  # first, while they are in the cache
        if self.graph is None:
            self._perform(changing)
        else:
            where = self, tuple(addresses(changing) or ())
            self.graph(partial(self._perform, changing), changing[0].device, where)
        return True

    def _perform(self, changing: Sequence[Tensor]) -> None:
        self.begin()
        if self._alone is not None:
            self._part(0, [changing[i] for i in self._alone])
        else:
            assert self._rest is not None
            self._rest(self._part, *changing)

    def _part(self, part: int, tensors: Sequence[Tensor]) -> None:
        """Run a part; these tensors are the memories that are others in every step."""
        self.run(part, [t if t.is_contiguous() else t.contiguous() for t in tensors])

    # ------------------------------------------------------------------ what a backend does

    def able(self, launch: Relaunch) -> bool:
        """Whether a launch may be a part of a native call."""
        raise NotImplementedError

    def compile(
        self,
        memories: Sequence[VectorMemory],
        parts: Sequence[list[VectorNode | Launched]],
        kept: Collection[int],
    ) -> Collection[int] | None:
        """Compile the parts; returns the memories that they need, or None where it cannot be.

        Those that are `kept` others look at.
        """
        raise NotImplementedError

    def bind(self, sources: Sequence[Sequence[int]]) -> int:
        """Make the tables; returns the count of native calls.

        `sources` are for each part the memories that are others in every step.
        """
        raise NotImplementedError

    def begin(self) -> None:
        """Take the gradients of a step."""

    def run(self, part: int, tensors: Sequence[Tensor]) -> None:
        """Run a part."""
        raise NotImplementedError


class Room:
    """The memory of a step's own, and where each memory lies.

    Args:
        memories: Those of a step.
        kept: Those of them that it looks at.
        like: A tensor of the device.

    Attributes:
        own: The bytes.
    """

    def __init__(
        self, memories: Sequence[VectorMemory], kept: Collection[int], like: Tensor
    ) -> None:
        self._memories, self._offsets, size = memories, dict[int, int](), 0
        for m in sorted(kept):
            memory = memories[m]
            if memory.own:
                self._offsets[m] = size
                size += -(-memory.size * memory.dtype.itemsize // LINE) * LINE
        self.own = like.new_zeros(size + LINE, dtype=torch.uint8, requires_grad=False)
        self._held = [memory.tensor for memory in memories]

    def address(self, m: int, entry: int = 0) -> int:
        """Where an entry of a memory lies; 0 for one of rows, or that is another in every step."""
        memory = self._memories[m]
        size = memory.dtype.itemsize
        if memory.tensor is not None:
            return _address(memory.tensor) + (entry - memory.start) * size
        if memory.source is not None or memory.rows:
            return 0
        return _address(self.own) + self._offsets[m] + entry * size

    def find(self, place: Region) -> Tensor | None:
        """The tensor of a region; None where it is another one in every step."""
        return None if self._memories[place.memory].source is not None else self.tensor(place)

    def tensor(self, place: Region) -> Tensor:
        """The tensor of a region, in memory that stays where it is."""
        memory = self._memories[place.memory]
        if memory.tensor is not None:
            return memory.tensor.as_strided(place.shape, place.strides, place.start)
        begin = self._offsets[place.memory]
        room = self.own[begin : begin + memory.size * place.dtype.itemsize].view(place.dtype)
        return room.as_strided(place.shape, place.strides, place.start + room.storage_offset())

    def close(self) -> None:
        """Let go of what would hold the graph."""
        del self._memories


def misfits(launch: Relaunch) -> bool:
    """Whether some tensors of a launch have gaps, or another order in memory than others."""
    return bool(launch.launch([], [], []).misfits())


def _address(t: Tensor) -> int:
    return (addresses([t]) or [0])[0]
