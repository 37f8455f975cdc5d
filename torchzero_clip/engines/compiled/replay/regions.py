"""Regions: where the tensors of a step graph are in memory.

`GraphRegions` is the part of `Lowering` that deals with memory. A memory is one of three things:

- a tensor that existed before the step;
- a tensor that is new in every step;
- memory that belongs to the compiled step.

`GraphRegions` gives each tensor in the graph a region. A region has a dtype, a shape and strides,
and refers to one memory. The region of a view refers to the same memory as the region of its
source. So compiled segments need no operation for a view.
"""

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
from torchzero_clip.engines.compiled.replay.pruning import may_alias, writes


class Unsupported(Exception):
    """Raised if a node cannot be lowered, so that PyTorch must run the node.

    The message is the reason, such as " of 32768 entries". It may be empty.
    """


class GraphRegions:
    """The region of each node of a step graph, and the memory that the regions refer to.

    Args:
        graph: The step graph.
        leaves: The inputs of the graph during recording.
        changing: The inputs that are new tensors in every step.
        device: The device of the step. Tensors on other devices have no region.

    Attributes:
        sequence: The lowered step: a list of segments and of nodes that PyTorch runs.
        memories: Every memory of the step. A region stores the index of its memory in this list.
        regions: The region of each node. Some nodes have no region.
        leaves: The recorded value of each input node.
        changing: A dictionary from each input node that is new in every step to the index of the
            node's tensor in the argument `changing`.
        sources: A dictionary from the index of a memory to a node whose tensor has this memory.
    """

    def __init__(
        self, graph: Graph, leaves: Sequence[Any], changing: Sequence[Tensor], device: torch.device
    ) -> None:
        self.device = device
        self.memories = list[VectorMemory]()
        self.sequence: list[Segment | GraphNode] = []
        self.regions: dict[GraphNode, Region] = {}
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.leaves: dict[GraphNode, Any] = dict(zip(inputs, leaves, strict=True))
        which = {id(t): i for i, t in enumerate(changing)}
        self.changing = {x: which[id(t)] for x, t in self.leaves.items() if id(t) in which}
        self.sources = dict[int, GraphNode]()
        self._roots: dict[GraphNode, int] = {}  # the memory of each node that is not a view
        self._known: dict[Any, int] = {}  # memories by storage, rows or node

    def _memory(self, key: Any, memory: VectorMemory) -> int:
        """Return the index of the memory with this key, and add `memory` if the key is new."""
        if key not in self._known:
            self._known[key] = len(self.memories)
            self.memories.append(memory)
        return self._known[key]

    def _leaf(self, node: GraphNode) -> None:
        """Store the region of an input node, if its dtype, device and layout are supported."""
        t = self.leaves[node]
        if not isinstance(t, Tensor) or t.dtype not in DTYPES or t.device != self.device:
            return
        if node in self.changing:
            if t.is_contiguous():
                self._root(node, VectorMemory(t.dtype, changes=True), int(t.storage_offset()))
            return
        storage = max(storages([t]), default=0) or id(t)  # an empty tensor has no storage
        memory = VectorMemory(t.dtype, t, start=int(t.storage_offset()))
        self._root(node, memory, 0, ("storage", storage))

    def _root(self, node: GraphNode, memory: VectorMemory, offset: int, key: Any = None) -> None:
        """Store the region of a node that is not a view.

        Args:
            node: The node.
            memory: The memory of the node.
            offset: The storage offset at which the memory begins.
            key: The key of the memory. Nodes whose tensors share storage have the same key.
        """
        m = self._memory(key or node, memory)
        self.sources.setdefault(m, node)
        if self.memories[m].dtype == memory.dtype:
            self._roots[node] = m
            self.regions[node] = _region(node, m, offset)

    def _view(self, node: GraphNode) -> bool:
        """Store the region of a node if the node is a view, and return whether it is a view.

        If a call returns a list of tensors, each item of the list also counts as a view. If the
        source of a view has no region, PyTorch runs the view.
        """
        if node in self._roots:
            if self.memories[self._roots[node]].changes:
                self.sequence.append(node)
            return True
        operator = node.meta.get("operator")
        changes_form = operator is None or torch.Tag.inplace_view in operator.tags
        if not may_alias(node) or (writes(node) and not changes_form):
            return False
        root = node.all_input_nodes[0]
        while root not in self._roots and root.all_input_nodes and may_alias(root):
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
        """Return the region for the result of a node, in new memory of the compiled step."""
        dtype, device, shape, strides, _ = node.meta.get("form", (None, None, (), (), 0))
        if dtype not in DTYPES or device != self.device:
            raise Unsupported
        size = 1 + sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)])
        self._root(node, VectorMemory(dtype, size=0 if 0 in shape else size), 0)
        return self.regions[node]

    def _region(self, x: Any) -> Region:
        """Return the region of a tensor operand, or raise `Unsupported` if it has none."""
        if not isinstance(x, GraphNode) or x not in self.regions:
            raise Unsupported
        return self.regions[x]

    def _operand(self, x: Any) -> VectorOperand:
        """Return an operand of a vector node: the number `x`, or the region of the tensor `x`."""
        return x if isinstance(x, (bool, int, float)) else self._region(x)

    # ------------------------------------------------------------------ lists

    def _side_by_side(self, lists: Sequence[Sequence[Any]]) -> list[tuple[Any, list[Any]]]:
        """Merge similar operands of neighboring tensors, so that one node computes many tensors.

        Args:
            lists: A list for each argument, with one operand per tensor. The node writes to the
                operands in the first list.

        Returns:
            A pair for each node: the operands of the first tensor of the node, and the merged
            operands. A merged region has an additional first dim.
        """
        merged: list[tuple[Any, list[Any]]] = []
        columns = zip(*lists, strict=True)
        for _, similar in itertools.groupby(columns, lambda column: list(map(self._kind, column))):
            group = list(similar)
            shape = group[0][0].shape
            merged.append((group[0], [self._row(row, shape) for row in zip(*group, strict=True)]))
        return merged

    def _kind(self, x: VectorOperand) -> Any:
        """Return the kind of an operand. Operands are merged only if their kinds are equal.

        Two numbers are merged only if they are the same number. Two regions in memory that is new
        in every step are merged only if they are the same region.
        """
        if not isinstance(x, Region):
            return repr(x)
        changes = self.memories[x.memory].changes
        return x.dtype, x.shape, x.strides, x if changes else None

    def _row(self, row: Sequence[VectorOperand], shape: Sequence[int]) -> VectorOperand:
        """Broadcast similar operands to `shape`, and merge them along a new first dim."""
        regions = [x.expanded(shape) for x in row if isinstance(x, Region)]
        if len(regions) < 2:
            return regions[0] if regions else row[0]
        first = regions[0]
        shape = (len(row), *shape)
        steps = {b.start - a.start for a, b in itertools.pairwise(regions)}
        if len({x.memory for x in regions}) == 1 and len(steps) == 1 and min(steps) >= 0:
            return first._replace(shape=shape, strides=(*steps, *first.strides))
        rows = tuple([(x.memory, x.start) for x in regions])
        memory = self._memory((first.dtype, rows), VectorMemory(first.dtype, rows=rows))
        return Region(memory, first.dtype, shape, (1, *first.strides))


def _region(node: GraphNode, memory: int, offset: int) -> Region:
    """Return the region of a node. Its memory begins at the storage offset `offset`."""
    dtype, _, shape, strides, start = node.meta["form"]
    return Region(memory, dtype, tuple(shape), tuple(strides), start - offset)
