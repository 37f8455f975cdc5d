"""Rest: what of a step stays torch's, as a function that calls the parts between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph
from torch.fx import Node as GraphNode

from torchzero_clip.engines.compiled.again.lowering import Lowering
from torchzero_clip.engines.compiled.again.recorder import python
from torchzero_clip.engines.compiled.again.shorter import views
from torchzero_clip.engines.compiled.printers.vectors import Launched, Region, VectorNode


class Rest:
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
    return {x.memory for x in (node.out, *node.given) if isinstance(x, Region)}
