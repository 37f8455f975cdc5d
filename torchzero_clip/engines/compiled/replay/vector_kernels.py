"""Vector kernels: order the nodes of a segment so that vector nodes need few kernels.

A vector node computes with a few numbers, such as norms. A segment runs in stages. A stage is
either one launch of a list program, or one kernel that runs several vector nodes. `stages` orders
the nodes of a segment so that many vector nodes share a kernel. `CompiledStep` compiles the stages
in the order that `stages` returns.
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


def stages(nodes: Segment, memories: Sequence[VectorMemory]) -> list[Segment]:
    """Return the nodes of a segment in stages: single launches, and groups of vector nodes.

    Vector nodes run in the gaps between launches. Gap k is the place before launch k. A vector node
    must run after all nodes that it depends on, and before all nodes that depend on it. These rules
    give a first and a last possible gap for each vector node. A gap has a kernel only if it is the
    last possible gap of some waiting node. The kernel runs all waiting nodes that are allowed in
    the gap.
    """
    memory_uses = [_memory_uses(node, memories) for node in nodes]
    launches = [node for node in nodes if isinstance(node, Launched)]
    first = _first_gaps(nodes, memory_uses)
    backwards = _first_gaps(nodes[::-1], memory_uses[::-1])
    last = [len(launches) - gap for gap in reversed(backwards)]
    waiting = [i for i, node in enumerate(nodes) if isinstance(node, VectorNode)]
    ordered: list[Segment] = []
    for gap in range(len(launches) + 1):
        if any([last[i] == gap for i in waiting]):
            ordered.append([nodes[i] for i in waiting if first[i] <= gap])
            waiting = [i for i in waiting if first[i] > gap]
        ordered += [[node] for node in launches[gap : gap + 1]]
    return ordered


def _first_gaps(nodes: Segment, memory_uses: Sequence[tuple[set[int], set[int]]]) -> list[int]:
    """Return the first possible gap of each node, after all nodes that this node depends on."""
    written_in = dict[int, int]()  # by memory, the last gap in which it is written
    read_in = dict[int, int]()
    gaps = list[int]()
    launches = 0
    for node, (reads, writes) in zip(nodes, memory_uses, strict=True):
        after = [written_in.get(m, 0) for m in reads | writes] + [read_in.get(m, 0) for m in writes]
        gap = max(after, default=0)
        gaps.append(gap)
        if isinstance(node, Launched):
            launches += 1
            gap = launches  # nodes that depend on the launch run after it
        for m in reads:
            read_in[m] = max(read_in.get(m, 0), gap)
        for m in writes:
            written_in[m] = max(written_in.get(m, 0), gap)
    return gaps


def _memory_uses(
    node: VectorNode | Launched, memories: Sequence[VectorMemory]
) -> tuple[set[int], set[int]]:
    """Return the indices of memory that a node reads, and of memory that the node may write."""
    reads = touched(node.given, memories)
    writes = touched([node.out], memories)
    if isinstance(node, Launched):  # its lists of tensors may share memory with other memories
        buffers = [b for b in node.launch.buffers if isinstance(b, Buffer)]
        list_storages = storages([t for b in buffers for t in b.tensors])
        all_known = len(buffers) == len(node.launch.buffers)  # no gradients among the buffers
        for m, memory in enumerate(memories):
            own_storage = set() if memory.tensor is None else storages([memory.tensor])
            if own_storage & list_storages or (memory.changes and not all_known):
                writes.add(m)
    return reads, writes
