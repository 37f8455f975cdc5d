"""PyTorch calls: the operators of a compiled step that PyTorch runs between segments.

`TorchCalls` receives a lowered step and builds a second graph. In the second graph each segment is
a single call, and every other node is a PyTorch call. If a step has more than one segment,
`CompiledStep` turns the second graph into a Python function and calls this function in each replay.
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
    """A graph with one call for each segment, and with the operators that PyTorch runs.

    Args:
        lowered: The lowered step.
        changing: The number of inputs that are new tensors in every step.

    Attributes:
        read: The index of each memory that PyTorch calls read.
        memories: A list for each segment. The list has the index of each memory that the segment
            uses and that is new in every step.
        sources: A list for each segment. The list has the nodes whose tensors are the memory in
            `memories`.
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
        """Add an input for a node of the step graph whose value `x` is the same in every step."""
        self._fixed.append(x)
        self._nodes[node] = self._graph.placeholder(f"fixed{len(self._fixed)}")
        return self._nodes[node]

    def _node(self, node: GraphNode) -> GraphNode:
        """Return the node of the new graph that has the value of a node of the step graph."""
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
        """Return the graph as a Python function.

        Args:
            tensor: A function that returns the tensor of a node. The memory of the node must be the
                same in every step.

        Returns:
            A function with the arguments `run` and `*changing`. It calls `run(segment, tensors)`
            for each segment. The inputs that are new in every step are passed as `changing`.
        """
        call = python(self._graph)
        fixed = [tensor(x) if isinstance(x, GraphNode) else x for x in self._fixed]
        return lambda run, *changing: call(run, *changing, *fixed)
