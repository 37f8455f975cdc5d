"""Loops: which nodes of a vector program are done together.

Nodes of one shape are one loop, as far as none reads what another has yet to write.
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
    """Nodes that are done together: of the same shape, or a single other one."""

    shape: tuple[int, ...]
    nodes: list[VectorNode | Launched]
    open: bool
    """Whether others may join."""

    def takes(self, node: VectorNode, memories: Sequence[VectorMemory]) -> bool:
        """Whether a node may join: what it shares with others is entry by entry the same."""
        if not self.open or node.out.shape != self.shape:
            return False
        pairs = [(other.out, x) for other in self.nodes for x in (node.out, *node.given)]
        pairs += [(node.out, x) for other in self.nodes for x in other.given]
        return not any(touched([a], memories) & touched([b], memories) for a, b in pairs if a != b)

    def hinders(self, node: VectorNode, memories: Sequence[VectorMemory]) -> bool:
        """Whether a node must not happen before this loop."""
        if isinstance(self.nodes[0], Launched):
            return True
        read, written = touched(node.given, memories), touched([node.out], memories)
        theirs = touched([other.out for other in self.nodes], memories)
        given = touched([x for other in self.nodes for x in other.given], memories)
        return bool(theirs & (read | written) or written & given)


def loops(nodes: Sequence[VectorNode | Launched], memories: Sequence[VectorMemory]) -> list[Loop]:
    """Nodes as loops, each as early as it may be."""
    found: list[Loop] = []
    for node in nodes:
        if isinstance(node, VectorNode) and node.name in OPERATORS:
            near = (
                x for x in reversed(found) if x.takes(node, memories) or x.hinders(node, memories)
            )
            loop = next(near, None)
            if loop is None or not loop.takes(node, memories):
                loop = Loop(node.out.shape, [], True)
                found.append(loop)
            loop.nodes.append(node)
        else:
            found.append(Loop((), [node], False))
    return found
