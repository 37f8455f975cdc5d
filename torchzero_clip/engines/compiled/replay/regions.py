"""Regions: where the tensors of a graph lie, each in a region of a memory, which its form tells."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx import Node as GraphNode

from torchzero_clip.core.tensor_kinds import storages
from torchzero_clip.engines.compiled.printers.vectors import (
    DTYPES,
    Region,
    Segment,
    VectorMemory,
    VectorOperand,
)
from torchzero_clip.engines.compiled.replay.pruning import views, writes


class Lacking(Exception):
    """Raised where the table has no operator for a call; it says what is odd about the call."""


class GraphRegions:
    """The memories of a graph, and where in them its nodes lie.

    Args:
        graph, leaves: The graph, and what its inputs are.
        changing: Those of them that are others in every step.
        home: The device whose memory it is.

    Attributes:
        sequence: Segments of nodes of the table, and between them calls that stay torch's.
        regions: Where the nodes of the graph lie.
        leaves: What the inputs of the graph are.
        changing: For each input that is another one in every step, which of those it is.
        sources: The nodes whose tensors memories are that are others in every step.
    """

    def __init__(
        self, graph: Graph, leaves: Sequence[Any], changing: Sequence[Tensor], home: torch.device
    ) -> None:
        self.home, self.memories = home, list[VectorMemory]()
        self.sequence: list[Segment | GraphNode] = []
        self.regions: dict[GraphNode, Region] = {}
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.leaves: dict[GraphNode, Any] = dict(zip(inputs, leaves, strict=True))
        which = {id(t): i for i, t in enumerate(changing)}
        self.changing = {x: which[id(t)] for x, t in self.leaves.items() if id(t) in which}
        self._roots: dict[GraphNode, int] = {}  # the memory of a node that is no view
        self.sources = dict[int, GraphNode]()
        self._known: dict[Any, int] = {}  # memory by the storage, or by its rows

    def _memory(self, key: Any, memory: VectorMemory) -> int:
        """The number of a memory, a new one for a key that is not known."""
        if key not in self._known:
            self._known[key] = len(self.memories)
            self.memories.append(memory)
        return self._known[key]

    def _leaf(self, node: GraphNode) -> None:
        t = self.leaves[node]
        if not isinstance(t, Tensor) or t.dtype not in DTYPES or t.device != self.home:
            return
        if node in self.changing:
            if t.is_contiguous():
                self._root(node, VectorMemory(t.dtype, changes=True), int(t.storage_offset()))
            return
        key = max(storages([t]), default=0) or id(t)  # of nothing, which is nowhere
        memory = VectorMemory(t.dtype, t, start=int(t.storage_offset()))
        self._root(node, memory, 0, ("storage", key))

    def _root(self, node: GraphNode, memory: VectorMemory, offset: int, key: Any = None) -> None:
        """Have a node lie in a memory, `offset` entries behind where its form says."""
        at = self._memory(key or node, memory)
        self.sources.setdefault(at, node)
        if self.memories[at].dtype == memory.dtype:
            self._roots[node], self.regions[node] = at, _region(node, at, offset)

    def _view(self, node: GraphNode) -> bool:
        """Whether a node is a view, or one of several results, whose region its form tells."""
        if node in self._roots:
            if self.memories[self._roots[node]].changes:
                self.sequence.append(node)
            return True
        operator = node.meta.get("operator")
        again = operator is None or torch.Tag.inplace_view in operator.tags  # in another form
        if not views(node) or (writes(node) and not again):
            return False
        root = node.all_input_nodes[0]
        while root not in self._roots and root.all_input_nodes and views(root):
            root = root.all_input_nodes[0]
        if root not in self._roots:
            self.sequence.append(node)
        elif "form" in node.meta:
            base = self.regions[root]
            region = _region(node, base.memory, root.meta["form"][4] - base.start)
            if region.dtype == base.dtype:
                self.regions[node] = region
        return True

    def _fresh(self, node: GraphNode) -> Region:
        """A region in new memory for what a node makes."""
        dtype, device, shape, strides, _ = node.meta.get("form", (None, None, (), (), 0))
        if dtype not in DTYPES or device != self.home:
            raise Lacking
        size = 1 + sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)])
        self._root(node, VectorMemory(dtype, size=0 if 0 in shape else size), 0)
        return self.regions[node]

    def _region(self, x: Any) -> Region:
        """Where an operand lies that is a tensor."""
        if not isinstance(x, GraphNode) or x not in self.regions:
            raise Lacking
        return self.regions[x]

    def _operand(self, x: Any) -> VectorOperand:
        """An operand as a node takes it."""
        return x if isinstance(x, (bool, int, float)) else self._region(x)

    # ------------------------------------------------------------------ lists

    def _side_by_side(self, lists: Sequence[Sequence[Any]]) -> list[tuple[Any, list[Any]]]:
        """Lists of operands, those in a row that are alike as one operand with another dim.

        Each comes with the first of them. The first list is what is written.
        """
        found: list[tuple[Any, list[Any]]] = []
        columns = zip(*lists, strict=True)
        for _, run in itertools.groupby(columns, lambda column: list(map(self._kind, column))):
            some = list(run)
            rows = [self._row(row, some[0][0].shape) for row in zip(*some, strict=True)]
            found.append((some[0], rows))
        return found

    def _kind(self, x: VectorOperand) -> Any:
        """What operands have in common that are alike: of numbers, and of memory that is another
        one in every step, all.
        """
        if not isinstance(x, Region):
            return repr(x)
        changes = self.memories[x.memory].changes
        return x.dtype, x.shape, x.strides, x if changes else None

    def _row(self, row: Sequence[VectorOperand], shape: Sequence[int]) -> VectorOperand:
        """Regions that are alike as one, each for this shape: another dim stands before it."""
        regions = [x.expanded(shape) for x in row if isinstance(x, Region)]
        if len(regions) < 2:
            return regions[0] if regions else row[0]
        first, shape = regions[0], (len(row), *shape)
        steps = {b.start - a.start for a, b in itertools.pairwise(regions)}
        if len({x.memory for x in regions}) == 1 and len(steps) == 1 and min(steps) >= 0:
            return first._replace(shape=shape, strides=(*steps, *first.strides))
        rows = tuple([(x.memory, x.start) for x in regions])
        memory = self._memory((first.dtype, rows), VectorMemory(first.dtype, rows=rows))
        return Region(memory, first.dtype, shape, (1, *first.strides))


def _region(node: GraphNode, memory: int, offset: int) -> Region:
    dtype, _, shape, strides, start = node.meta["form"]
    return Region(memory, dtype, tuple(shape), tuple(strides), start - offset)
