"""Printer: what vector programs in C++ and in Triton have in common.

A value that is read in its own loop alone needs no memory. Sizes, steps and addresses are looked up
in tables, so that models that differ in nothing else share a library.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torchzero_clip.engines.compiled.loops import Loop, loops
from torchzero_clip.engines.compiled.vectors import (
    Launched,
    Region,
    VectorMemory,
    VectorNode,
    touched,
)

LoopDims: TypeAlias = "list[tuple[int, list[int]]]"
"""The sizes of loops, and for each of them the steps of some regions."""


@dataclass
class Tables:
    """What a text looks up while it runs.

    Attributes:
        pointers: For each address whose it is: a memory, or a part of a launch.
        integers: Sizes and steps; those of launches that may change are entries of their own.
    """

    pointers: list[Any] = field(default_factory=list)
    integers: list[Any] = field(default_factory=list)

    def pointer(self, whose: Any) -> str:
        return f"p[{index_of(self.pointers, whose)}]"

    def integer(self, n: Any) -> str:
        return str(n) if n in (0, 1) else f"d[{index_of(self.integers, n)}]"


def index_of(row: list[Any], x: Any) -> int:
    """The place of something in a table, where it is put if it is not there."""
    if x not in row:
        row.append(x)
    return row.index(x)


def nodes_of(loop: Loop) -> list[VectorNode]:
    """The nodes of a loop that are no launches."""
    return [node for node in loop.nodes if isinstance(node, VectorNode)]


class Printer:
    """The parts of a step.

    Args:
        memories: Those of the places.
        parts: Lists of nodes.
        kept: Memories that others than these nodes look at.

    Attributes:
        kept: All memories that are more than a value in a loop.
    """

    def __init__(
        self,
        memories: Sequence[VectorMemory],
        parts: Sequence[Sequence[VectorNode | Launched]],
        kept: Collection[int],
    ) -> None:
        self.memories, self.tables = memories, Tables()
        self.loops = [loops(part, memories) for part in parts]
        self.kept = set(kept) | self._shared()
        self._count = 0

    def _shared(self) -> set[int]:
        """Memories in which more than one loop, or more than one place of it, looks."""
        users: dict[int, set[Any]] = {}
        found: set[int] = set()
        every = [loop for part in self.loops for loop in part]
        for i, loop in enumerate(every):
            for node in loop.nodes:
                if isinstance(node, Launched):
                    found |= touched([*node.given, node.out], self.memories)
                    continue
                for x in (node.out, *node.given):
                    if isinstance(x, Region):
                        known = self.memories[x.memory]
                        if known.rows or not loop.open:
                            found |= touched([x], self.memories)
                        else:
                            users.setdefault(x.memory, set()).add((i, x))
        written = {node.out.memory for part in self.loops for x in part for node in nodes_of(x)}
        once = {memory for memory, places in users.items() if len(places) == 1} & written
        return found | (users.keys() - once)

    def inner(self, place: Region) -> bool:
        """Whether a place lies in memory of the program's own."""
        memory = self.memories[place.memory]
        return memory.tensor is None and memory.source is None and not memory.rows

    def stored(self, place: Region) -> bool:
        """Whether what is written there is more than a value in a loop."""
        return place.memory in self.kept or not self.inner(place)

    def name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def in_rows(self, place: Region) -> bool:
        """Whether its first dim goes from one memory to the next."""
        return bool(self.memories[place.memory].rows)

    def dims(self, shape: Sequence[int], places: Sequence[Region]) -> LoopDims:
        """The loops over a shape: dims that lie behind one another in all places are one."""
        rows, dims = any(map(self.in_rows, places)), list[tuple[int, list[int]]]()
        for d, n in enumerate(shape):
            steps = [x.strides[d] for x in places]
            if n == 1:
                continue
            last = dims[-1][1] if dims and not (rows and d == 1) else None
            if last is not None and all([a == b * n for a, b in zip(last, steps, strict=True)]):
                dims[-1] = dims[-1][0] * n, steps
            else:
                dims.append((n, steps))
        return dims
