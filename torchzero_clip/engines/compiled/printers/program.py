"""Programs: what lies on a tape, as a function of the tensors of each buffer, in canonical names.

Names are canonical, so that equal tapes are one program. `interpreted` runs it node by
node; cpp.py and triton.py print it for a compiler.
"""

from __future__ import annotations

import itertools
import linecache
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.formats import lower, upper, wide_of
from torchzero_clip.core.formats.stochastic import Elements, rounded
from torchzero_clip.core.norms import Measure, SliceRows, numbers, statistics, statistics_of_slices
from torchzero_clip.core.state import HALF
from torchzero_clip.engines.buffers import Buffer
from torchzero_clip.engines.compiled.printers.operators import OPERATORS, over

NodeOperand: TypeAlias = "tuple[str, Any]"
"""A kind and which of it: ("value", node), ("buffer", i), ("number", i), ("scalar", i), ("vector",
i), ("row", i) for a vector with an entry a slice, ("dtype", name) or ("half", 0 to 3) of random
bits. Scalars are 0-dim tensors on the device; vectors have an entry a tensor."""
Node: TypeAlias = "tuple[str, tuple[NodeOperand, ...]]"
"""An operator and its operands; the first is a value, or the buffer that is loaded."""
Measurement: TypeAlias = "tuple[Measure, int] | None"
"""A measure and the value whose tensors it is taken of."""

TAKEN = ("buffer", "number", "vector", "scalar")
"""The kinds of operands that a launch gives."""
WORDS = ("dtype", "half")
"""The kinds of operands that are words in a text; others have a name there."""
OTHERS = {"load": "{0}", "to": "{0}.to({1})"}
"""The nodes there that are no operators."""
MOST = 1000  # programs that are remembered


class Program(NamedTuple):
    """What lies on a tape: equal ones are compiled once in a process."""

    nodes: tuple[Node, ...]
    stores: tuple[tuple[int, int], ...]
    """Pairs of a buffer and the value that goes there."""
    measured: Measurement
    buffers: tuple[torch.dtype, ...]
    vectors: tuple[torch.dtype, ...]
    scalars: tuple[torch.dtype, ...]
    device: torch.device
    rows: bool = False
    """Whether slices of tensors are measured, or have operands of their own."""

    @property
    def numbers(self) -> int:
        """The count of Python numbers that it takes."""
        operands = [operand for _, node in self.nodes for operand in node]
        return max([which + 1 for kind, which in operands if kind == "number"], default=0)

    @property
    def of_rows(self) -> set[int]:
        """The vectors that have an entry a slice."""
        return {which for _, node in self.nodes for kind, which in node if kind == "row"}

    @property
    def operands(self) -> Iterator[tuple[str, int, torch.dtype]]:
        """What it is given: the kind, which it is, and the dtype of an entry."""
        yield from [("buffer", i, dtype) for i, dtype in enumerate(self.buffers)]
        yield from [("number", i, torch.float64) for i in range(self.numbers)]
        for i, dtype in enumerate(self.vectors):
            yield "row" if i in self.of_rows else "vector", i, dtype
        yield from [("scalar", i, dtype) for i, dtype in enumerate(self.scalars)]

    def source(self) -> str:
        """Return the source of a function of the operands, for one tensor.

        The function returns the value to be measured. Values of 16 bits are computed in float32,
        as in compiled kernels: PyTorch would round the product of a bfloat16 tensor and a number.
        """
        body, stored = list[str](), [value for _, value in self.stores]
        for i, (name, operands) in enumerate(self.nodes):
            terms = [which if kind in WORDS else f"{kind}{which}" for kind, which in operands]
            text = (OTHERS.get(name) or OPERATORS[name].torch).format(*terms)
            if self._narrow(name, operands):
                text += ".float()"
            elif name == "load" and i in stored:
                text += ".clone()"
            body.append(f"value{i} = {text}")
        body += [f"buffer{i}.copy_(value{value})" for i, value in self.stores]
        body += [] if self.measured is None else [f"return [value{self.measured[1]}]"]
        names = ", ".join([f"{kind}{i}" for kind, i, _ in self.operands])
        return "\n    ".join([f"def program({names}):", *body])

    def _narrow(self, name: str, operands: tuple[NodeOperand, ...]) -> bool:
        """Whether a node loads, or rounds to, floating-point numbers of 16 bits."""
        if name == "load":
            return self.buffers[operands[0][1]] in HALF
        return name == "to" and operands[1][1] in map(str, HALF)


@cache
def interpreted(program: Program) -> Callable[..., Any]:
    """The function of a program, run node by node."""
    source = program.source()
    name = f"<torchzero_clip program {zlib.crc32(source.encode()):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "over": over, "rounded": rounded}
    space |= {"upper": upper, "lower": lower, "wide_of": wide_of}
    exec(compile(source, name, "exec"), space)
    made: Callable[..., Any] = space["program"]
    return made


@dataclass
class Launch:
    """A program and the tensors and numbers that it is run with.

    Attributes:
        sizes: The number of entries of each tensor.
        elements: The places of entries in whole parameters, where some are rounded by them.
        rows: The slices that are measured, or that have operands of their own.
    """

    program: Program
    sizes: list[int]
    elements: Elements | None
    buffers: list[Buffer]
    numbers: Sequence[float]
    vectors: list[Tensor]
    scalars: list[Tensor]
    rows: SliceRows | None = field(default=None, kw_only=True)

    @property
    def width(self) -> int:
        """The count of statistics that it measures."""
        return len(self.sizes) if self.rows is None else sum(self.rows.counts)

    @cached_property
    def sent(self) -> Tensor:
        """The numbers, on the device."""
        return numbers(self.numbers or [0.0], self.program.device)

    @property
    def read(self) -> list[Tensor]:
        """The tensors that are read."""
        nodes = self.program.nodes
        return self._of({operands[0][1] for name, operands in nodes if name == "load"})

    @property
    def written(self) -> list[Tensor]:
        """The tensors that are written."""
        return self._of({i for i, _ in self.program.stores})

    def _of(self, buffers: Collection[int]) -> list[Tensor]:
        return [t for i in sorted(buffers) for t in self.buffers[i].tensors]

    def misfits(self) -> list[int]:
        """The tensors with gaps in memory, or with another order in one buffer than in another."""
        in_order = self.elements is None or self.elements.contiguous
        if self.rows is not None:
            lists = zip(*[buffer.tensors for buffer in self.buffers], strict=True)
            return [i for i, some in enumerate(lists) if not all([t.is_contiguous() for t in some])]
        if in_order and all([buffer.contiguous for buffer in self.buffers]):
            return []
        return [i for i in range(len(self.sizes)) if not self._fits(i)]

    def _fits(self, i: int) -> bool:
        if not all([buffer.dense[i] for buffer in self.buffers]):
            return False
        some = [buffer.tensors[i] for buffer in self.buffers]
        if self.elements is not None and not self.elements.follow(i, some[0]):
            return False
        return len({t.stride() for t in some}) == 1 or all([t.is_contiguous() for t in some])

    def plainly(self, some: Collection[int]) -> Tensor | None:
        """Run the program for these tensors, node by node; returns the statistics of them."""
        if not some:
            return None
        function, values = interpreted(self.program), list[Tensor]()
        numbers = self.sent.unbind()[: self.program.numbers]
        for i in some:
            vectors = [self._entry(vector, k, i) for k, vector in enumerate(self.vectors)]
            tensors = [torch.atleast_1d(buffer.tensors[i]) for buffer in self.buffers]
            values += function(*tensors, *numbers, *vectors, *self.scalars) or []
        measured = self.program.measured
        if measured is None:
            return None
        if self.rows is None:
            return statistics(values, measured[0])[:1]
        dims = [self.rows.dims[i] for i in some]
        return torch.cat(statistics_of_slices(values, dims, measured[0]), dim=1)[:1]

    def columns(self, some: Collection[int]) -> list[int]:
        """Where the statistics of these tensors stand among all."""
        if self.rows is None:
            return list(some)
        ends = list(itertools.accumulate(self.rows.counts, initial=0))
        return [k for i in some for k in range(ends[i], ends[i + 1])]

    def _entry(self, vector: Tensor, which: int, i: int) -> Tensor:
        """The number of a vector for the i-th tensors; of all their elements or slices, these."""
        if self.rows is not None and which in self.program.of_rows:
            return vector[self.columns([i])].view(self.rows.shapes[i])
        if self.elements is None or vector is not self.elements.starts:
            return vector[i]
        return torch.atleast_1d(self.elements.index(i, self.buffers[0].tensors[i]))


class Relaunch:
    """A launch that is done again, with other numbers and gradients.

    Args:
        launch: The one that was written down.
        runner: A weak reference to what runs launches, which itself holds this.
        buffers: Its buffers; of gradients the places of these.
        gradients: The buffers of gradients in a step, by places.
    """

    def __init__(
        self,
        launch: Launch,
        runner: Callable[[], Any],
        buffers: Sequence[Buffer | tuple[int, ...]],
        gradients: dict[tuple[int, ...], Buffer],
    ) -> None:
        self.program, self.sizes, self.elements = launch.program, launch.sizes, launch.elements
        self.buffers, self.gradients, self._runner = buffers, gradients, runner
        self.rows, self.width = launch.rows, launch.width

    def __call__(self, numbers: Any, vectors: Any, scalars: Any) -> Tensor | None:
        launch = self.launch(list(map(float, numbers)), vectors, scalars)
        found: Tensor | None = self._runner().run(launch)
        return found

    def launch(self, *given: Any) -> Launch:
        """The launch with the gradients of this step."""
        now = [b if isinstance(b, Buffer) else self.gradients[b] for b in self.buffers]
        return Launch(self.program, self.sizes, self.elements, now, *given, rows=self.rows)


@lru_cache(MOST)
def program_of(
    nodes: Sequence[Node],
    stores: Sequence[tuple[int, int]],
    measured: Measurement,
    dtypes: Sequence[Sequence[torch.dtype]],
    device: torch.device,
    rows: bool = False,
) -> tuple[Program, list[tuple[int, ...]]]:
    """A program of the nodes that these stores need, named in the order of use.

    `dtypes` are those of the buffers, vectors and scalars. Comes with the buffers, numbers, vectors
    and scalars of the tape that it takes, in its order.
    """
    needed = {value for _, value in (*stores, *([] if measured is None else [measured]))}
    for i in range(len(nodes) - 1, -1, -1):
        if i in needed:
            needed |= {which for kind, which in nodes[i][1] if kind == "value"}
    new: dict[str, dict[int, int]] = {kind: {} for kind in ("value", *TAKEN)}

    def name(kind: str, which: Any) -> NodeOperand:
        known = new.get("vector" if kind == "row" else kind)
        return kind, which if known is None else known.setdefault(which, len(known))

    lines = []
    for i in sorted(needed):
        lines.append((nodes[i][0], tuple([name(*operand) for operand in nodes[i][1]])))
        name("value", i)
    ends = [(name("buffer", i)[1], name("value", v)[1]) for i, v in stores]
    taken = {kind: tuple(new[kind]) for kind in TAKEN}
    lists = zip(("buffer", "vector", "scalar"), dtypes, strict=True)
    buffers, vectors, scalars = [tuple([row[i] for i in taken[kind]]) for kind, row in lists]
    end = None if measured is None else (measured[0], new["value"][measured[1]])
    made = tuple(lines), tuple(sorted(ends)), end
    program = Program(*made, buffers, vectors, scalars, device)
    return program._replace(rows=rows and bool(measured or program.of_rows)), list(taken.values())
