"""Steps: a step that was written down, as few native calls over tables of pointers.

Launches and the vectors between them are parts of one library; where torch's operators stand
between, a function calls the parts and these in turn. From step to step only the addresses of
gradients change, and of what torch makes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.fx import Graph
from torch.fx import Node as GraphNode

from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.build import function
from torchzero_clip.engines.compiled.cpp import kernel_of, threads_for
from torchzero_clip.engines.compiled.lowering import Lowering
from torchzero_clip.engines.compiled.printer import ENDS, Printer
from torchzero_clip.engines.compiled.recorder import Relaunch, python
from torchzero_clip.engines.compiled.shorter import views
from torchzero_clip.engines.compiled.vectors import Launched, VectorNode

FLAGS = "-std=c++17 -O1 -march=native -fno-math-errno -ffp-contract=off -fno-strict-aliasing"
FLAGS += " -fPIC -shared"
LONGEST = 2000  # nodes of a step that is compiled: to compile more takes too long


class NativeStep:
    """A step as a native call, or as several with torch's between.

    Args:
        graph, leaves: The step that was written down.
        changing: The leaves that are others in every step.
        gradients: The buffers of gradients of the step on its way, by places.

    Attributes:
        lacking: The operators that stay calls of torch.
        calls: How many native calls it is.
        text: The source of its library.
        works: Whether it could be compiled.
    """

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        changing: Sequence[Tensor],
        gradients: dict[tuple[int, ...], Buffer],
    ) -> None:
        made = Lowering(graph, leaves, changing, _able)
        self.lacking, self._gradients = made.lacking, gradients
        parts = [part for part in made.parts if isinstance(part, list)]
        self.calls = len(parts)
        nodes = [node for part in parts for node in part]
        self._launches = [node.launch for node in nodes if isinstance(node, Launched)]
        rest = _Rest(made, leaves, graph, changing)
        self.works = 0 < len(nodes) <= LONGEST
        if not self.works:
            return
        printer = Printer(made.memories, parts, rest.kept)
        self.text = printer.text()
        self._kernel = function(self.text, FLAGS)
        self.works = self._kernel is not None
        if not self.works:
            return
        self._kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong]
        self._bind(made, printer)
        self._alone, self._rest = None, None
        if len(made.parts) == 1:
            places = {id(leaf): i for i, leaf in enumerate(changing)}
            sources = [leaves[i] for i in rest.sources_of(0)]
            self._alone = [places[id(leaf)] for leaf in sources]
        else:
            self._rest = rest.function(self._tensor)
        del self._places, self._memories  # they would hold the graph
        self._slots = [[self._pointers.index(("memory", m)) for m in row] for row in rest.memories]
        written = [node.out.memory for node in nodes if type(node) is VectorNode]
        held = [made.memories[m].tensor for m in dict.fromkeys(written)]
        self._written = [t for t in held if t is not None]
        self._written_grads: list[tuple[int, ...]] = []
        for launch in self._launches:
            for i in {i for i, _ in launch.program.stores}:
                buffer = launch.buffers[i]
                if isinstance(buffer, Buffer):
                    self._written += buffer.tensors
                else:
                    self._written_grads.append(buffer)

    def __call__(self, changing: Sequence[Tensor]) -> bool:
        """Do the step, unless the gradients do not lie as programs need them.

        `changing` stand in the place of those that it was written down with.
        """
        buffers = list(self._gradients.values())
        dense = self._dense and all([buffer.contiguous for buffer in buffers])
        if not dense and any([_misfits(launch) for launch in self._launches]):
            return False
        if not dense and not all([t.is_contiguous() for t in changing]):
            return False
        if torch.get_num_threads() != self._threads:
            self._share()
        for lists, i, key in self._lists:
            lists[i] = self._gradients[key].addresses.buffer_info()[0]
        if self._alone is not None:
            self._run(0, [changing[i] for i in self._alone])
        else:
            assert self._rest is not None
            self._rest(self._run, *changing)
        written = self._written
        for key in self._written_grads:
            written = written + self._gradients[key].tensors
        increment_version(written)
        return True

    def _run(self, part: int, tensors: Sequence[Tensor]) -> None:
        """Run a part; these tensors are the memories that are others in every step."""
        held = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        for slot, t in zip(self._slots[part], held, strict=True):
            self._p[slot] = t.data_ptr()
        self._kernel(*self._given, part)

    # ------------------------------------------------------------------ tables

    def _bind(self, made: Lowering, printer: Printer) -> None:
        """Make the tables, and the memory of the program's own."""
        memories, self._pointers = made.memories, printer.tables.pointers
        offsets, size = dict[int, int](), 0
        for m in sorted(printer.kept):
            memory = memories[m]
            if memory.tensor is None and memory.source is None and not memory.rows:
                offsets[m], size = size, size + -(-memory.size * memory.dtype.itemsize // 64) * 64
        self._room = torch.zeros(size + 64, dtype=torch.uint8, device="cpu")
        self._offsets, self._places, self._memories = offsets, made.regions, memories
        self._held: list[Any] = [memory.tensor for memory in memories]
        self._d = array("q", [n if isinstance(n, int) else 0 for n in printer.tables.integers])
        self._counts = [
            (i, x[0]) for i, x in enumerate(printer.tables.integers) if type(x) is tuple
        ]
        self._p = array("Q", [0] * len(self._pointers))
        self._lists: list[tuple[array[int], int, tuple[int, ...]]] = []
        for i, (whose, which) in enumerate(self._pointers):
            if whose == "memory":
                self._p[i] = self._address(which)
            elif which == "kernel":
                self._p[i] = _address_of(kernel_of(whose.program))
            elif which == "sizes":
                self._p[i] = self._hold(array("q", whose.sizes))
            elif which == "lists":
                self._p[i] = self._hold(self._addresses(whose))
        self._given = self._p.buffer_info()[0], self._d.buffer_info()[0]
        fixed = [b for x in self._launches for b in x.buffers if isinstance(b, Buffer)]
        in_order = [x.elements is None or x.elements.contiguous for x in self._launches]
        self._dense = all([b.contiguous for b in fixed]) and all(in_order)
        self._share()

    def _hold(self, table: array[Any]) -> int:
        self._held.append(table)
        return table.buffer_info()[0]

    def _address(self, m: int) -> int:
        memory = self._memories[m]
        size = memory.dtype.itemsize
        if memory.rows:
            return self._hold(array("Q", [self._address(i) + at * size for i, at in memory.rows]))
        if memory.tensor is not None:
            return memory.tensor.data_ptr() - memory.start * size
        return 0 if memory.source is not None else self._room.data_ptr() + self._offsets[m]

    def _addresses(self, launch: Relaunch) -> array[int]:
        """The addresses of the lists of a launch, those of gradients to be filled in."""
        lists = array("Q", [0] * len(launch.buffers))
        for i, buffer in enumerate(launch.buffers):
            if isinstance(buffer, Buffer):
                self._held.append(buffer)
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
                parts = array("d", [0.0] * len(whose.sizes) * threads_for(whose.sizes))
                self._parts.append(parts)
                self._p[i] = parts.buffer_info()[0]

    def _tensor(self, node: GraphNode) -> Tensor:
        """The tensor of a node, in memory that stays where it is."""
        place = self._places[node]
        memory = self._memories[place.memory]
        if memory.tensor is not None:
            return memory.tensor.as_strided(place.shape, place.strides, place.start)
        begin = self._offsets[place.memory]
        room = self._room[begin : begin + memory.size * place.dtype.itemsize].view(place.dtype)
        return room.as_strided(place.shape, place.strides, place.start + room.storage_offset())


class _Rest:
    """What stays torch's, as a graph that calls the parts between.

    Attributes:
        kept: The memories that it looks at.
        memories: For each part those that are others in every step.
    """

    def __init__(
        self,
        made: Lowering,
        leaves: Sequence[Any],
        graph: Graph,
        changing: Sequence[Tensor],
    ) -> None:
        self._made, self._graph = made, Graph()
        given = [node for node in graph.nodes if node.op == "placeholder"]
        self._leaf = dict(zip(given, leaves, strict=True))
        self._places = {id(t): i for i, t in enumerate(changing)}
        self._new: dict[GraphNode, GraphNode] = {}
        self._fixed: list[Any] = []  # what its inputs are: nodes, whose tensors stay, and objects
        run = self._graph.placeholder("run")
        self._changing = [self._graph.placeholder(f"given{i}") for i in range(len(changing))]
        self.kept, self.memories = set[int](), list[list[int]]()
        self._sources: list[list[GraphNode]] = []
        self._input_of: dict[Any, GraphNode] = {}
        for part in made.parts:
            if isinstance(part, GraphNode):
                self._new[part] = self._graph.node_copy(part, self._value)
                continue
            found = sorted({m for node in part for m in _memories(node, made)})
            self.memories.append([m for m in found if made.memories[m].source is not None])
            nodes = [made.memories[m].source for m in self.memories[-1]]
            self._sources.append([node for node in nodes if node is not None])
            values = [self._value(node) for node in self._sources[-1]]
            self._graph.call_function(_run_part, (run, len(self.memories) - 1, values))
        self._graph.output(None)
        self._order = given

    def sources_of(self, part: int) -> list[int]:
        """The places among the leaves of what changes."""
        return [self._order.index(node) for node in self._sources[part]]

    def _input(self, key: Any, x: Any) -> GraphNode:
        if key not in self._input_of:
            self._fixed.append(x)
            self._input_of[key] = self._graph.placeholder(f"fixed{len(self._fixed)}")
        return self._input_of[key]

    def _value(self, node: GraphNode) -> GraphNode:
        """The node here that stands for one of the step."""
        if node in self._new:
            return self._new[node]
        if node in self._leaf:
            leaf = self._leaf[node]
            place = self._places.get(id(leaf))
            return self._input(node, leaf) if place is None else self._changing[place]
        place_of = self._made.regions.get(node)
        if place_of is not None and self._made.memories[place_of.memory].source is None:
            self.kept.add(place_of.memory)
            return self._input(node, node)
        assert views(node)
        self._new[node] = self._graph.node_copy(node, self._value)
        return self._new[node]

    def function(self, tensor: Any) -> Any:
        """It as a function of what changes."""
        call = python(self._graph)
        fixed = [tensor(x) if isinstance(x, GraphNode) else x for x in self._fixed]
        return lambda run, *changing: call(run, *changing, *fixed)


def _run_part(run: Any, part: int, tensors: Sequence[Tensor]) -> None:
    run(part, tensors)


def _memories(node: VectorNode | Launched, made: Lowering) -> set[int]:
    """The memories of a node."""
    given = (
        (node.out, *node.given)
        if isinstance(node, VectorNode)
        else (node.out, *node.numbers, *node.vectors)
    )
    return {x.memory for x in given if x is not None and not isinstance(x, (bool, int, float))}


def _able(launch: Relaunch) -> bool:
    """Whether a launch may be a part of a native call."""
    program = launch.program
    measured = program.measured
    known = measured is None or measured[0].kind == "max" or measured[0].p in ENDS
    here = program.device.type == "cpu" and not program.scalars and known
    return here and not _misfits(launch) and kernel_of(program) is not None


def _misfits(launch: Relaunch) -> bool:
    return bool(launch.launch([], [], []).misfits())


def _address_of(kernel: Any) -> int:
    return ctypes.cast(kernel, ctypes.c_void_p).value or 0
