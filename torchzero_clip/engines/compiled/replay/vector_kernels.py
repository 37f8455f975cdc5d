"""Turns: vectors in as few kernels as can be, in turn with the launches between them.

A vector waits for the launch whose numbers it takes, and others wait with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchzero_clip.core.tensor_kinds import storages
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.vectors import (
    Launched,
    Segment,
    VectorMemory,
    VectorNode,
    touched,
)


def turns(nodes: Segment, memories: Sequence[VectorMemory]) -> list[Segment]:
    """Nodes in as few kernels as can be, in turn with the launches, each of which is alone.

    Gap k lies before launch k. A node may go to any gap from the first that has what it reads to
    the last before somebody needs it.
    """
    marks = [_marks(node, memories) for node in nodes]
    launches = [node for node in nodes if isinstance(node, Launched)]
    first, back = _gaps(nodes, marks), _gaps(nodes[::-1], marks[::-1])
    last = [len(launches) - gap for gap in reversed(back)]
    left = [i for i, node in enumerate(nodes) if isinstance(node, VectorNode)]
    found: list[Segment] = []
    for gap in range(len(launches) + 1):
        if any([last[i] == gap for i in left]):
            found.append([nodes[i] for i in left if first[i] <= gap])
            left = [i for i in left if first[i] > gap]
        found += [[node] for node in launches[gap : gap + 1]]
    return found


def _gaps(nodes: Segment, marks: Sequence[tuple[set[int], set[int]]]) -> list[int]:
    """The first gap that each node may go to."""
    wrote, read, found, launches = dict[int, int](), dict[int, int](), list[int](), 0
    for node, (reads, writes) in zip(nodes, marks, strict=True):
        after = [wrote.get(m, 0) for m in reads | writes] + [read.get(m, 0) for m in writes]
        gap = max(after, default=0)
        found.append(gap)
        if isinstance(node, Launched):
            launches += 1
            gap = launches  # what follows it
        for m in reads:
            read[m] = max(read.get(m, 0), gap)
        for m in writes:
            wrote[m] = max(wrote.get(m, 0), gap)
    return found


def _marks(
    node: VectorNode | Launched, memories: Sequence[VectorMemory]
) -> tuple[set[int], set[int]]:
    """The memories that a node reads, and those that it writes."""
    reads, writes = touched(node.given, memories), touched([node.out], memories)
    if isinstance(node, Launched):  # and all that may lie where its lists do
        buffers = [b for b in node.launch.buffers if isinstance(b, Buffer)]
        lists = storages([t for b in buffers for t in b.tensors])
        whole = len(buffers) == len(node.launch.buffers)
        for m, memory in enumerate(memories):
            lies = set() if memory.tensor is None else storages([memory.tensor])
            if lies & lists or (memory.changes and not whole):
                writes.add(m)
    return reads, writes
