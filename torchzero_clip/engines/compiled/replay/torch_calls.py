"""PyTorch's part of a compiled step: the calls that stay PyTorch's, between the segments.

`TorchCalls` receives a lowered step and builds a graph from it, in which each segment is a single
call. `CompiledStep` compiles this graph to a Python function and calls it for each replay, if a
step is more than one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Graph
from torch.fx import Node as GraphNode

from torchzero_clip.engines.compiled.printers.vectors import regions_of
from torchzero_clip.engines.compiled.replay.lowering import Lowering
from torchzero_clip.engines.compiled.replay.pruning import may_alias
from torchzero_clip.engines.compiled.replay.step_recorder import python


class TorchCalls:
    """A graph of the calls that stay PyTorch's and of calls that run the segments.

    Args:
        lowered: The lowered step.
        changing: The number of inputs that are new tensors in every step.

    Attributes:
        read: The memories that calls of PyTorch read.
        memories: For each segment, the memories that are new in every step.
        sources: For each segment, the nodes whose tensors have these memories.
    """

    def __init__(self, lowered: Lowering, changing: int) -> None:
        self._lowered = lowered
        self._graph = Graph()
        self._fixed: list[Any] = []  # inputs that stay: objects, and nodes whose tensors stay
        run = self._graph.placeholder("run")
        inputs = [self._graph.placeholder(f"given{i}") for i in range(changing)]
        # by node of the step graph: the node in the graph here
        self._nodes = {node: inputs[i] for node, i in lowered.changing.items()}
        self.read = set[int]()
        self.memories = list[list[int]]()
        self.sources: list[list[GraphNode]] = []
        for item in lowered.sequence:
            if isinstance(item, GraphNode):
                self._nodes[item] = self._graph.node_copy(item, self._node)
                continue
            touched = sorted({x.memory for x in regions_of(item)})
            new = [m for m in touched if lowered.memories[m].changes]
            sources = [lowered.sources[m] for m in new]
            tensors = list(map(self._node, sources))
            self._graph.call_method("__call__", (run, len(self.memories), tensors))
            self.memories.append(new)
            self.sources.append(sources)
        self._graph.output(None)

    def _input(self, node: GraphNode, x: Any) -> GraphNode:
        """Add an input that stays, in place of a node of the step graph."""
        self._fixed.append(x)
        self._nodes[node] = self._graph.placeholder(f"fixed{len(self._fixed)}")
        return self._nodes[node]

    def _node(self, node: GraphNode) -> GraphNode:
        """Return the node in the graph here that gives the value of a node of the step graph."""
        lowered = self._lowered
        if node in self._nodes:
            return self._nodes[node]
        if node in lowered.leaves:
            return self._input(node, lowered.leaves[node])
        region = lowered.regions.get(node)
        if region is not None and not lowered.memories[region.memory].changes:
            self.read.add(region.memory)
            return self._input(node, node)
        assert may_alias(node)
        self._nodes[node] = self._graph.node_copy(node, self._node)
        return self._nodes[node]

    def function(self, tensor: Callable[[GraphNode], Tensor]) -> Callable[..., None]:
        """Return the graph as a function.

        Args:
            tensor: Returns the tensor of a node that has the same memory in every step.

        Returns:
            A function of `run(segment, tensors)`, which it calls for each segment, and of the
            inputs that are new in every step.
        """
        call = python(self._graph)
        fixed = [tensor(x) if isinstance(x, GraphNode) else x for x in self._fixed]
        return lambda run, *changing: call(run, *changing, *fixed)
