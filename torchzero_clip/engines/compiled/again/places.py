"""Places: where the tensors of a graph lie, each a region of a memory, which its form tells."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx import Node as GraphNode

from torchzero_clip.core.tensors import storages
from torchzero_clip.engines.compiled.again.shorter import views, writes
from torchzero_clip.engines.compiled.printers.vectors import (
    DTYPES,
    Launched,
    Region,
    VectorMemory,
    VectorNode,
    VectorOperand,
)


class Lacking(Exception):
    """Raised where the table has no operator for a call."""


class Places:
    """The memories of a graph, and where in them its nodes lie.

    Args:
        graph, leaves: The graph, and what its inputs are.
        changing: Those of them that are others in every step.
        home: The device whose memory it is.

    Attributes:
        parts: Nodes of the table in a row, and calls that stay torch's.
        regions: The places of the nodes of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        leaves: Sequence[Any],
        changing: Sequence[Tensor],
        home: torch.device,
    ) -> None:
        self.home = home
        self.parts: list[list[VectorNode | Launched] | GraphNode] = []
        self.memories = list[VectorMemory]()
        self.regions: dict[GraphNode, Region] = {}
        self._changing = set(map(id, changing))
        given = [node for node in graph.nodes if node.op == "placeholder"]
        self._given = dict(zip(given, leaves, strict=True))
        self._roots: dict[GraphNode, int] = {}  # the memory of a node that is no view
        self._known: dict[Any, int] = {}  # memory by the storage, or by its rows

    def _memory(self, key: Any, memory: VectorMemory) -> int:
        """The place of a memory among all, a new one for a key that is not known."""
        if key not in self._known:
            self._known[key] = len(self.memories)
            self.memories.append(memory)
        return self._known[key]

    def _leaf(self, node: GraphNode) -> None:
        t = self._given[node]
        if not isinstance(t, Tensor) or t.dtype not in DTYPES or t.device != self.home:
            return
        if id(t) in self._changing:
            if t.is_contiguous():
                self._root(node, VectorMemory(t.dtype, source=node), int(t.storage_offset()))
            return
        key = max(storages([t]), default=0) or id(t)  # of nothing, which is nowhere
        memory = VectorMemory(t.dtype, t, start=int(t.storage_offset()))
        self._root(node, memory, 0, ("storage", key))

    def _root(self, node: GraphNode, memory: VectorMemory, offset: int, key: Any = None) -> None:
        """Have a node lie in a memory, `offset` entries behind where its form says."""
        at = self._memory(key or node, memory)
        if self.memories[at].dtype == memory.dtype:
            self._roots[node], self.regions[node] = at, self._place(node, at, offset)

    def _place(self, node: GraphNode, memory: int, offset: int) -> Region:
        dtype, _, shape, strides, start = node.meta["form"]
        return Region(memory, dtype, tuple(shape), tuple(strides), start - offset)

    def _view(self, node: GraphNode) -> bool:
        """Whether a node is a view, or one of several results, whose place its form tells."""
        if node in self._roots or not views(node):
            if node in self._roots and self.memories[self._roots[node]].source is not None:
                self.parts.append(node)
            return node in self._roots
        operator = node.meta.get("operator")
        if operator is not None and writes(node) and torch.Tag.inplace_view not in operator.tags:
            return False
        root = node.all_input_nodes[0]
        while root not in self._roots and root.all_input_nodes and views(root):
            root = root.all_input_nodes[0]
        if root in self._roots:
            if "form" in node.meta:
                base = self.regions[root]
                place = self._place(node, base.memory, 0)
                if place.dtype == base.dtype:
                    offset = root.meta["form"][4] - base.start
                    self.regions[node] = place._replace(start=place.start - offset)
        else:
            self.parts.append(node)
        return True

    def _fresh(self, node: GraphNode) -> Region:
        """A place in new memory for what a node makes."""
        dtype, device, shape, strides, _ = node.meta.get("form", (None, None, (), (), 0))
        if dtype not in DTYPES or device != self.home:
            raise Lacking(str(node.meta.get("operator", "a function")))
        size = 1 + sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)])
        self._root(node, VectorMemory(dtype, size=0 if 0 in shape else size), 0)
        return self.regions[node]

    def _found(self, x: Any, name: str) -> VectorOperand:
        """An operand as a node takes it."""
        if isinstance(x, (bool, int, float)):
            return x
        if not isinstance(x, GraphNode) or x not in self.regions:
            raise Lacking(name)
        return self.regions[x]

    # ------------------------------------------------------------------ lists

    def _side_by_side(self, lists: Sequence[Sequence[Any]]) -> list[tuple[Any, list[Any]]]:
        """Lists of operands, those in a row that are alike as one operand with another dim.

        Each comes with the first of them. The first list is what is written.
        """
        found: list[tuple[Any, list[Any]]] = []
        columns = list(zip(*lists, strict=True))
        begin = 0
        for end in range(1, len(columns) + 1):
            if end == len(columns) or not self._alike(columns[begin], columns[end]):
                some, shape = columns[begin:end], columns[begin][0].shape
                found.append((some[0], [self._row(row, shape) for row in zip(*some, strict=True)]))
                begin = end
        return found

    def _alike(self, some: Sequence[VectorOperand], others: Sequence[VectorOperand]) -> bool:
        for a, b in zip(some, others, strict=True):
            if not (isinstance(a, Region) and isinstance(b, Region)):
                if repr(a) != repr(b):
                    return False
                continue
            sources = [self.memories[x.memory].source for x in (a, b)]
            apart = a != b and sources != [None, None]
            if apart or (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
                return False
        return True

    def _row(self, row: Sequence[VectorOperand], shape: Sequence[int]) -> VectorOperand:
        """Regions that are alike as one, each for this shape: another dim stands before it."""
        places = [x.expanded(shape) for x in row if isinstance(x, Region)]
        if len(places) < 2:
            return places[0] if places else row[0]
        first, shape = places[0], (len(row), *shape)
        steps = {b.start - a.start for a, b in itertools.pairwise(places)}
        if len({x.memory for x in places}) == 1 and len(steps) == 1:
            return first._replace(shape=shape, strides=(*steps, *first.strides))
        rows = tuple([(x.memory, x.start) for x in places])
        memory = self._memory((first.dtype, rows), VectorMemory(first.dtype, rows=rows))
        return Region(memory, first.dtype, shape, (1, *first.strides))
