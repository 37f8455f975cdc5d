"""Torch calls: what of a step stays torch's, as a function that calls the segments between."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph
from torch.fx import Node as GraphNode

from torchzero_clip.engines.compiled.printers.vectors import regions_of
from torchzero_clip.engines.compiled.replay.lowering import Lowering
from torchzero_clip.engines.compiled.replay.pruning import views
from torchzero_clip.engines.compiled.replay.step_recorder import python


class TorchCalls:
    """What stays torch's, as a graph that calls the segments between.

    Args:
        made: The sequence of a step.
        changing: The number of leaves that are others in every step.

    Attributes:
        read: The memories that it looks at.
        memories: For each segment those that are others in every step.
        sources: The nodes whose tensors these are.
    """

    def __init__(self, made: Lowering, changing: int) -> None:
        self._made, self._graph = made, Graph()
        self._fixed: list[Any] = []  # what its inputs are: nodes, whose tensors stay, and objects
        run = self._graph.placeholder("run")
        given = [self._graph.placeholder(f"given{i}") for i in range(changing)]
        self._new = {node: given[i] for node, i in made.changing.items()}  # known here
        self.read, self.memories = set[int](), list[list[int]]()
        self.sources: list[list[GraphNode]] = []
        for one in made.sequence:
            if isinstance(one, GraphNode):
                self._new[one] = self._graph.node_copy(one, self._value)
                continue
            every = sorted({x.memory for x in regions_of(one)})
            self.memories.append([m for m in every if made.memories[m].changes])
            self.sources.append([made.sources[m] for m in self.memories[-1]])
            values = list(map(self._value, self.sources[-1]))
            self._graph.call_method("__call__", (run, len(self.memories) - 1, values))
        self._graph.output(None)

    def _input(self, node: GraphNode, x: Any) -> GraphNode:
        """An input of the graph for a node of the step."""
        self._fixed.append(x)
        self._new[node] = self._graph.placeholder(f"fixed{len(self._fixed)}")
        return self._new[node]

    def _value(self, node: GraphNode) -> GraphNode:
        """The node here that stands for one of the step."""
        made = self._made
        if node in self._new:
            return self._new[node]
        if node in made.leaves:
            return self._input(node, made.leaves[node])
        region = made.regions.get(node)
        if region is not None and not made.memories[region.memory].changes:
            self.read.add(region.memory)
            return self._input(node, node)
        assert views(node)
        self._new[node] = self._graph.node_copy(node, self._value)
        return self._new[node]

    def function(self, tensor: Any) -> Any:
        """It as a function of what runs a segment, and of what changes."""
        call = python(self._graph)
        fixed = [tensor(x) if isinstance(x, GraphNode) else x for x in self._fixed]
        return lambda run, *changing: call(run, *changing, *fixed)
