"""Programs: recorded nodes as a function of tensors, in a form that can be compared.

`program_of` turns the nodes of a tape into a `Program`. Operands are numbered in the order of use,
so that equal tapes give equal programs. A `Launch` is one run of a program: the program with its
buffers, numbers, vectors and scalars. The modules cpp.py and triton.py print programs for a
compiler. The method `Program.computed` runs a program in PyTorch, node by node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
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
"""The kind of an operand, and its index or name.

- ("value", i): the result of node i;
- ("buffer", i): a list of tensors;
- ("number", i): a Python float;
- ("scalar", i): a 0-dim tensor on the device;
- ("vector", i): a tensor with one element per tensor of the list;
- ("row", i): a vector with one element per slice;
- ("dtype", name): a dtype to cast to;
- ("half", 0 to 3): which random bits stochastic rounding uses, and for which dtype.
"""
Node: TypeAlias = "tuple[str, tuple[NodeOperand, ...]]"
"""An operator and its operands. The first operand is a value; for "load" it is a buffer."""
Measurement: TypeAlias = "tuple[Measure, int] | None"
"""A measure, and the index of the measured value. None if nothing is measured."""

LAUNCH_KINDS = ("buffer", "number", "vector", "scalar")
"""The kinds of operands that a launch passes to a program."""
PROGRAMS_KEPT = 1000


class Program(NamedTuple):
    """The nodes of a tape as a function. Equal programs are compiled once in a process."""

    nodes: tuple[Node, ...]
    stores: tuple[tuple[int, int], ...]
    """Pairs of a buffer and the value that is written to it."""
    measured: Measurement
    buffers: tuple[torch.dtype, ...]
    vectors: tuple[torch.dtype, ...]
    scalars: tuple[torch.dtype, ...]
    device: torch.device
    rows: bool = False
    """Whether the program measures slices of tensors, or has operands for slices."""

    @property
    def numbers(self) -> int:
        """The number of operands that are Python floats."""
        operands = [operand for _, node in self.nodes for operand in node]
        return max([which + 1 for kind, which in operands if kind == "number"], default=0)

    @property
    def of_rows(self) -> set[int]:
        """The indices of the vectors that have one element per slice."""
        return {which for _, node in self.nodes for kind, which in node if kind == "row"}

    @property
    def operands(self) -> Iterator[tuple[str, int, torch.dtype]]:
        """All operands of the function, each with its kind, index and dtype."""
        yield from [("buffer", i, dtype) for i, dtype in enumerate(self.buffers)]
        yield from [("number", i, torch.float64) for i in range(self.numbers)]
        for i, dtype in enumerate(self.vectors):
            yield "row" if i in self.of_rows else "vector", i, dtype
        yield from [("scalar", i, dtype) for i, dtype in enumerate(self.scalars)]

    def computed(self, operands: dict[str, Sequence[Any]]) -> list[Tensor]:
        """Compute the program for one tensor by PyTorch's operators, and write the stores.

        Values of 16 bits are computed in float32, as in compiled kernels. Otherwise PyTorch would
        round the product of a bfloat16 tensor and a number.

        Args:
            operands: The operands of each kind, with one tensor in place of each buffer.

        Returns:
            The values of all nodes.
        """
        values = list[Tensor]()
        known = {**operands, "value": values}
        stored = {value for _, value in self.stores}
        for i, (name, node) in enumerate(self.nodes):
            x, *others = [known[kind][which] if kind in known else which for kind, which in node]
            kinds = [kind for kind, _ in node[1:]]
            others = [
                _in_dtype_of(x, other) if kind == "row" else other
                for kind, other in zip(kinds, others, strict=True)
            ]
            if name == "to":
                x = x.to(getattr(torch, others[0].removeprefix("torch.")))
            elif name != "load":
                x = function_of(name)(x, *others)
            if name in ("load", "to") and x.dtype in HALF:
                x = x.float()
            elif name == "load" and i in stored:  # a store may overwrite the buffer first
                x = x.clone()
            values.append(x)
        for i, value in self.stores:
            operands["buffer"][i].copy_(values[value])
        return values


def _in_dtype_of(x: Tensor, row: Tensor) -> Tensor:
    """Return the numbers of slices in the dtype of the elements, as in compiled kernels.

    PyTorch would compute float32 elements and float64 numbers of slices in float64.
    """
    return row.to(x.dtype) if x.is_floating_point() else row


@cache
def function_of(name: str) -> Callable[..., Tensor]:
    """Return an operator of list programs as a function that calls PyTorch."""
    text = OPERATORS[name].torch.format(*[f"x[{i}]" for i in range(4)])
    names: dict[str, Any] = {"torch": torch, "over": over, "rounded": rounded}
    names |= {"upper": upper, "lower": lower, "wide_of": wide_of}
    return eval(f"lambda *x: {text}", names)


@dataclass
class Launch:
    """One run of a program: the program with its tensors and numbers.

    Attributes:
        sizes: The number of elements of each tensor.
        elements: The places of elements in whole parameters. None unless stochastic rounding needs
            the places.
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
        """The number of statistics: one per tensor, or one per slice."""
        return len(self.sizes) if self.rows is None else sum(self.rows.counts)

    @property
    def read(self) -> list[Tensor]:
        """The tensors that the launch reads."""
        nodes = self.program.nodes
        return self._of({operands[0][1] for name, operands in nodes if name == "load"})

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the launch writes."""
        return self._of({i for i, _ in self.program.stores})

    def _of(self, buffers: Collection[int]) -> list[Tensor]:
        return [t for i in sorted(buffers) for t in self.buffers[i].tensors]

    def misfits(self) -> list[int]:
        """Return the positions of tensors that a kernel cannot process.

        Such tensors have gaps in memory, or their strides differ between buffers.
        """
        if self.rows is not None:
            lists = zip(*[buffer.tensors for buffer in self.buffers], strict=True)
            return [i for i, ts in enumerate(lists) if not all([t.is_contiguous() for t in ts])]
        in_order = self.elements is None or self.elements.contiguous
        if in_order and all([buffer.contiguous for buffer in self.buffers]):
            return []
        return [i for i in range(len(self.sizes)) if not self._fits(i)]

    def _fits(self, i: int) -> bool:
        """Return whether the i-th tensors of all buffers have the same order in memory."""
        if not all([buffer.dense[i] for buffer in self.buffers]):
            return False
        tensors = [buffer.tensors[i] for buffer in self.buffers]
        if self.elements is not None and not self.elements.follow(i, tensors[0]):
            return False
        return len({t.stride() for t in tensors}) == 1 or all([t.is_contiguous() for t in tensors])

    def run_by_torch(self, positions: Collection[int]) -> Tensor | None:
        """Run the program node by node for the tensors at some positions.

        Return the statistics of these tensors, or None if nothing is measured.
        """
        if not positions:
            return None
        measured = self.program.measured
        sent = numbers(self.numbers, self.program.device).unbind() if self.numbers else ()
        values = list[Tensor]()
        for i in positions:
            vectors = [self._element(vector, k, i) for k, vector in enumerate(self.vectors)]
            tensors = [torch.atleast_1d(buffer.tensors[i]) for buffer in self.buffers]
            if self.rows is not None and self.rows.views:
                tensors = [t.view(self.rows.views[i]) for t in tensors]
            computed = self.program.computed(
                {
                    "buffer": tensors,
                    "number": sent,
                    "scalar": self.scalars,
                    "vector": vectors,
                    "row": vectors,
                }
            )
            if measured is not None:
                values.append(computed[measured[1]])
        if measured is None:
            return None
        if self.rows is None:
            return statistics(values, measured[0])[:1]
        dims = [self.rows.dims[i] for i in positions]
        return torch.cat(statistics_of_slices(values, dims, measured[0]), dim=1)[:1]

    def columns(self, positions: Collection[int]) -> list[int]:
        """Return the columns of the statistics that belong to the tensors at some positions."""
        if self.rows is None:
            return list(positions)
        ends = list(itertools.accumulate(self.rows.counts, initial=0))
        return [column for i in positions for column in range(ends[i], ends[i + 1])]

    def _element(self, vector: Tensor, which: int, i: int) -> Tensor:
        """Return the element of a vector for the i-th tensor.

        A vector with one element per slice gives the elements of all slices of the tensor. The
        vector `elements.starts` of stochastic rounding gives the place of each element.
        """
        if self.rows is not None and which in self.program.of_rows:
            return vector[self.columns([i])].view(self.rows.shapes[i])
        if self.elements is None or vector is not self.elements.starts:
            return vector[i]
        return torch.atleast_1d(self.elements.index(i, self.buffers[0].tensors[i]))


class Relaunch:
    """A launch of a recorded step. Replayed steps run it with other numbers and gradients.

    Args:
        launch: The launch of the recorded step.
        runner: A weak reference to the runner. It is weak because the runner holds the step.
        buffers: The buffers of the launch. A buffer of gradients is replaced by the places of its
            gradients.
        gradients: The buffers of gradients of the current step. The key of a buffer is the places
            of its gradients.
    """

    def __init__(
        self,
        launch: Launch,
        runner: Callable[[], Any],
        buffers: Sequence[Buffer | tuple[int, ...]],
        gradients: dict[tuple[int, ...], Buffer],
    ) -> None:
        self.program = launch.program
        self.sizes = launch.sizes
        self.elements = launch.elements
        self.rows = launch.rows
        self.width = launch.width
        self.buffers = buffers
        self.gradients = gradients
        self._runner = runner

    def __call__(self, numbers: Any, vectors: Any, scalars: Any) -> Tensor | None:
        launch = self.launch(list(map(float, numbers)), vectors, scalars)
        return self._runner().run(launch)

    def launch(self, *operands: Any) -> Launch:
        """Return a launch with these numbers, vectors and scalars, and the current gradients."""
        buffers = [b if isinstance(b, Buffer) else self.gradients[b] for b in self.buffers]
        return Launch(self.program, self.sizes, self.elements, buffers, *operands, rows=self.rows)


@lru_cache(PROGRAMS_KEPT)
def program_of(
    nodes: Sequence[Node],
    stores: Sequence[tuple[int, int]],
    measured: Measurement,
    dtypes: Sequence[Sequence[torch.dtype]],
    device: torch.device,
    rows: bool = False,
) -> tuple[Program, list[tuple[int, ...]]]:
    """Return a program that computes only the given stores and measurement.

    `dtypes` has the dtypes of the tape's buffers, vectors and scalars. The second result has one
    entry for each of `LAUNCH_KINDS`: the indices of those operands of the tape that the program
    receives, in the program's order.
    """
    needed = {value for _, value in stores}
    if measured is not None:
        needed.add(measured[1])
    for i in range(len(nodes) - 1, -1, -1):
        if i in needed:
            needed |= {which for kind, which in nodes[i][1] if kind == "value"}
    new: dict[str, dict[int, int]] = {kind: {} for kind in ("value", *LAUNCH_KINDS)}

    def name(kind: str, which: Any) -> NodeOperand:
        known = new.get("vector" if kind == "row" else kind)
        return kind, which if known is None else known.setdefault(which, len(known))

    named = list[Node]()
    for i in sorted(needed):
        operator, operands = nodes[i]
        named.append((operator, tuple([name(*operand) for operand in operands])))
        name("value", i)
    ends = [(name("buffer", i)[1], name("value", v)[1]) for i, v in stores]
    end = None if measured is None else (measured[0], new["value"][measured[1]])
    taken = {kind: tuple(new[kind]) for kind in LAUNCH_KINDS}
    lists = zip(("buffer", "vector", "scalar"), dtypes, strict=True)
    buffers, vectors, scalars = [tuple([row[i] for i in taken[kind]]) for kind, row in lists]
    program = Program(tuple(named), tuple(sorted(ends)), end, buffers, vectors, scalars, device)
    return program._replace(rows=rows and bool(measured or program.of_rows)), list(taken.values())
