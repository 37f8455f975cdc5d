"""Vector programs in Triton: a kernel of one program does all nodes between two launches.

Entries go by as many as there are lanes. What one loop writes and another reads lies in memory,
with a barrier between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchzero_clip.engines.compiled.launches import POINTERS
from torchzero_clip.engines.compiled.loops import Loop
from torchzero_clip.engines.compiled.printer import Over, Printer, index_of, over
from torchzero_clip.engines.compiled.triton import STORED_AS, TRITON, page
from torchzero_clip.engines.compiled.vectors import Region


class VectorKernel(NamedTuple):
    """A kernel.

    Attributes:
        text: Its page.
        signature: Its arguments and their types.
        sources: The memories that it is given, which are others in every step.
        words: The table that it looks the rest up in: a whole number, or a memory and which of its
            entries, whose address it is.
    """

    text: str
    signature: dict[str, str]
    sources: list[int]
    words: list[int | tuple[int, int]]


class TritonPrinter(Printer):
    """The kernels of a step in Triton."""

    language = TRITON

    def kernel(self, part: Sequence[Loop]) -> VectorKernel:
        """The kernel of some loops in a row."""
        self.pointers, self.integers, self._count = list[int](), list[int](), 0
        self._head, body = list[str](), list[str]()
        for loop in part:
            body += ["tl.debug_barrier()"] * bool(body)
            body += self.lines(loop)
        words: list[int | tuple[int, int]] = [*[(m, 0) for m in self.pointers], *self.integers]
        head = list(dict.fromkeys(self._head))
        for i, m in enumerate(self.pointers):
            if self.memories[m].rows:
                head.append(f"m{i} = p + {len(words)}")
                words += self.memories[m].rows
        changing = [(i, m) for i, m in enumerate(self.pointers) if self._changes(m)]
        kinds = {f"s{i}": POINTERS[self.memories[m].dtype] for i, m in changing}
        signature = {"p": "*i64", **kinds}
        first = [f"d = p + {len(self.pointers)}", "lane = tl.arange(0, LANES)"]
        text = page(signature, "\n    ".join([*first, *head, *body]))
        return VectorKernel(text, signature, [m for _, m in changing], words)

    def _changes(self, m: int) -> bool:
        """Whether a memory is another one in every step."""
        return self.memories[m].source is not None

    # ------------------------------------------------------------------ what the language says

    def integer(self, n: Any) -> str:
        if n in (0, 1):
            return str(n)
        where = index_of(self.integers, n)
        self._head.append(f"n{where} = tl.load(d + {where})")
        return f"n{where}"

    def lanes(self, shape: Sequence[int], places: Sequence[Region]) -> Over:
        dims = self.dims(shape, places)
        if not dims:  # a single entry
            return over(places, [], [], [])
        i, size = self.name("i"), " * ".join([self.integer(n) for n, _ in dims])
        head, mask = f"for {i}_0 in range(0, {size}, LANES):", f"{i}_mask"
        inside = [f"{i} = {i}_0 + lane.to(tl.int64)", f"{mask} = {i} < {size}"]
        names = list[str]()
        for k, (n, _) in enumerate(reversed(dims[1:])):
            inside.append(f"{i}_{k + 1} = {i} % {self.integer(n)}")
            names.append(f"{i}_{k + 1}")
            inside.append(f"{i} = {i} // {self.integer(n)}")
        return over(places, dims, [i, *reversed(names)], [head], inside, mask)

    def _memory(self, x: Region) -> str:
        """The address of a memory; of rows that of a table of addresses."""
        where = index_of(self.pointers, x.memory)
        if not self.in_rows(x):
            value = f"s{where}" if self._changes(x.memory) else f"tl.load(p + {where})"
            self._head.append(f"m{where} = {value}{_pointer(x)}")
        return f"m{where}"

    def _at(self, x: Region, *loops: Over) -> tuple[str, str]:
        """The address of an entry, and the argument of a mask where lanes look at several."""
        at, (row, terms) = self._memory(x), self.index(x, loops)
        mask = next((f", mask={some.mask}" for some in loops if some.mask), "")
        if row:
            at = f"tl.load({at} + {row}{mask}{', other=0' * bool(mask)}){_pointer(x)}"
        elif not any([step for some in loops if some.mask for _, step in some.steps[x]]):
            mask = ""
        return " + ".join([at, *terms]), mask

    def address(self, x: Region, *loops: Over) -> str:
        return self._at(x, *loops)[0]

    def load(self, x: Region, *loops: Over) -> str:
        at, mask = self._at(x, *loops)
        return TRITON.read(f"tl.load({at}{mask}{', other=0' * bool(mask)})", x.dtype)

    def store(self, x: Region, value: str, *loops: Over) -> str:
        at, _ = self._at(x, *loops)
        mask = "".join([f", mask={some.mask}" for some in loops if some.mask])
        return f"tl.store({at}, {TRITON.written(value, x.dtype)}{mask})"


def _pointer(x: Region) -> str:
    """What makes an address of entries of a number."""
    return f".to(tl.pointer_type(tl.{STORED_AS[x.dtype]}))"
