"""Loops: nodes of a vector program, grouped so that each group runs in one loop.

Nodes whose results have the same shape share a loop. Two nodes cannot share a loop if one node
reads elements that the other node writes in another iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchzero_clip.engines.compiled.printers.operators import OPERATORS
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    VectorMemory,
    VectorNode,
    touched,
)


@dataclass
class Loop:
    """One loop: operators whose results have the same shape, or a single reduction or launch."""

    shape: tuple[int, ...]
    nodes: list[VectorNode | Launched]
    open: bool
    """Whether other nodes may join the loop."""

    def takes(self, node: VectorNode, memories: Sequence[VectorMemory]) -> bool:
        """Return whether a node may join the loop.

        The result of the node must have the shape of the loop. The node may share memory with the
        nodes of the loop only element by element.
        """
        if not self.open or node.out.shape != self.shape:
            return False
        pairs = [(other.out, x) for other in self.nodes for x in (node.out, *node.given)]
        pairs += [(node.out, x) for other in self.nodes for x in other.given]
        return not any(touched([a], memories) & touched([b], memories) for a, b in pairs if a != b)

    def hinders(self, node: VectorNode, memories: Sequence[VectorMemory]) -> bool:
        """Return whether a node must not run before this loop."""
        if isinstance(self.nodes[0], Launched):
            return True
        reads = touched(node.given, memories)
        writes = touched([node.out], memories)
        loop_reads = touched([x for other in self.nodes for x in other.given], memories)
        loop_writes = touched([other.out for other in self.nodes], memories)
        return bool(loop_writes & (reads | writes) or writes & loop_reads)


def loops(nodes: Sequence[VectorNode | Launched], memories: Sequence[VectorMemory]) -> list[Loop]:
    """Group nodes into loops. Each node joins the latest loop that it can join, or a new loop."""
    grouped: list[Loop] = []
    for node in nodes:
        if not isinstance(node, VectorNode) or node.name not in OPERATORS:
            grouped.append(Loop((), [node], False))
            continue
        near = (
            x for x in reversed(grouped) if x.takes(node, memories) or x.hinders(node, memories)
        )
        loop = next(near, None)
        if loop is None or not loop.takes(node, memories):
            loop = Loop(node.out.shape, [], True)
            grouped.append(loop)
        loop.nodes.append(node)
    return grouped
