"""Tapes: record the operators of lists, and run all of them later as one program.

A rule, such as Adam, computes with lists of tensors. In the compiled engine, these lists are
`Taped` lists. An operator of a `Taped` list adds a node to the `BucketTape` of the bucket, and
computes nothing. When values are needed, one program computes all recorded nodes in a single pass
over memory. Values are needed for a norm, at the end of the step, and when a rule reads the tensors
of a list. Rules do not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import Measure, SliceRows, statistics
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.engines.compiled.lists.memory import (
    GRADIENTS,
    PARAMETERS,
    WIDE,
    WIDE_GRADIENTS,
    Memory,
)
from torchzero_clip.engines.compiled.printers.language import ENDINGS
from torchzero_clip.engines.compiled.printers.program import (
    Launch,
    Measurement,
    NodeOperand,
    program_of,
)

MEASURED = {(m.kind, m.p): m for m in ENDINGS}
"""The measures that programs compute, in float64."""
SINGLE = (torch.float32, torch.bfloat16, torch.float16)
"""Programs measure only lists of these dtypes."""


class Taped(Lazy):
    """A list on a tape. Its values are in a buffer, or they are the result of a recorded node."""

    __slots__ = ("_cell", "_tape")

    def __init__(
        self, tape: BucketTape, *, buffer: int | None = None, value: int = -1, owned: bool = True
    ) -> None:
        super().__init__()
        self._tape = tape
        self.owned = owned
        self._cell = tape.cell(buffer, value)

    @property
    def buffer(self) -> int | None:
        """The index of the buffer with the values, or None if the values are not in a buffer."""
        return self._cell.buffer

    @property
    def value(self) -> int:
        """The index of the node with the current values of the list."""
        buffer = self._cell.buffer
        return self._cell.value if buffer is None else self._tape.load(buffer)

    @property
    def dtype(self) -> torch.dtype:
        return self._tape.dtypes[self.value]

    @property
    def pending(self) -> bool:
        return self.buffer is None or self._tape.pending(self.buffer)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the list, after the recorded operators have run.

        The operators run first because the caller may write to the tensors.
        """
        if self.buffer in self._tape.current:
            self._tape.run()
        tensors = self.compute()
        assert self.buffer is not None
        self._tape.show(self.buffer)
        return self._tape.lent(self.buffer) if self.owned else tensors

    @tensors.setter
    def tensors(self, tensors: Sequence[Tensor]) -> None:
        self._cell = self._tape.cell(self._tape.hold(tensors))

    def compute(self) -> list[Tensor]:
        """Return the tensors. Read them at once, because later operations may overwrite them."""
        self._tape.run_siblings()
        if self.buffer in (WIDE, WIDE_GRADIENTS):
            # new memory, because the caller may read it until the end of the step
            value = self.value
            buffer = self._tape.fresh(torch.float32)
            self._cell = self._tape.cell(buffer)
            self._tape.current[buffer] = value
        if self.pending:
            self._tape.run()
        assert self.buffer is not None
        return self._tape.buffers[self.buffer].tensors

    def __len__(self) -> int:
        return self._tape.count

    def statistics(self, m: Measure) -> Tensor:
        stats = self._tape.measure(self, m)
        return statistics(self.compute(), m) if stats is None else stats

    def _row_statistics(self, rows: SliceRows, m: Measure) -> Tensor | None:
        return self._tape.measure(self, m, rows) if rows.whole else None

    def on(self, tape: BucketTape) -> bool:
        """Return whether this list is on a tape."""
        return self._tape is tape

    def forget(self) -> None:
        """Drop the values, so that no buffer needs to store them."""
        self._cell = self._tape.cell(PARAMETERS)
        self.owned = False

    # ------------------------------------------------------------------ memory

    def borrow(self) -> Taped:
        borrowed = self._like(-1, PARAMETERS, owned=False)
        borrowed._cell = self._cell
        return self._lend(borrowed)

    def _like(self, value: int, buffer: int | None = None, owned: bool = True) -> Taped:
        """Return another list on the same tape, with the same measure."""
        other = Taped(self._tape, buffer=buffer, value=value, owned=owned)
        other.measure = self.measure
        self._tape.keep_up()
        return other

    def own(self) -> Taped:
        return self if self.owned else self._assign(self.value)

    def to(self, dtype: torch.dtype) -> Taped:
        if self.dtype == dtype:
            return self
        if self.buffer == GRADIENTS and dtype == torch.float32 and not self.owned:
            return self._like(-1, WIDE_GRADIENTS, owned=False)
        cast = Taped(self._tape, value=self._tape.cast(self.value, dtype))
        self._tape.keep_up()
        return cast

    def clone(self) -> Taped:
        return self._like(self.value)

    def copy_(self, source: TensorList) -> TensorList:
        if isinstance(source, Taped) and source.on(self._tape):
            return self._assign(self._tape.cast(source.value, self.dtype))
        return self._write_now(lambda plain: plain.copy_(source))

    def _assign(self, value: int) -> Taped:
        """Set the value of this list. A list that does not own its cell gets a new cell."""
        if not self.owned:
            self._move_to_cell(value)
        else:
            self._unshare()
            if self._cell.buffer is None:
                self._cell.value = value
            else:
                self._tape.current[self._cell.buffer] = value
        self._tape.keep_up()
        return self

    def _leave(self) -> None:
        # nothing may run here: the owner is about to assign a value that is only recorded
        self._move_to_cell(self.value)

    def _move_to_cell(self, value: int) -> None:
        """Set the value of this list in a new cell."""
        self._cell = self._tape.cell(value=value)
        self.owned = True
        self.loans = None

    # ------------------------------------------------------------------ operators

    def over_(self, ratio: Any) -> bool:
        """Divide by a ratio of any size; return whether the division could be recorded."""
        value = self._tape.add("over", self.value, (ratio,))
        if value is not None:
            self._assign(value)
        return value is not None

    def _new(self, name: str, *operands: Any) -> TensorList:
        value = self._tape.add(name, self.value, operands)
        if value is None:
            return TensorList(self.tensors, measure=self.measure)._new(name, *operands)
        return self._like(value)

    def _write(self, name: str, *operands: Any) -> TensorList:
        if name == "clamp":
            return self._write("clamp_min", operands[0])._write("clamp_max", operands[1])
        if name == "addcmul" and operands[2:]:  # the third operand is a factor of any kind
            operands = (self._promoted(operands[0]).mul(operands[2]), operands[1])
        value = self._tape.add(name, self.value, operands, keep_dtype=True)
        if value is not None:
            return self._assign(value)
        return self._write_now(lambda plain: plain._write(name, *operands))

    def _write_now(self, write: Callable[[TensorList], TensorList]) -> Taped:
        """Write to the tensors at once. A borrowed list gets its result in new memory."""
        dtype = self.dtype
        if self.owned:
            self._unshare()
        out = write(TensorList(self.tensors, owned=self.owned))
        if not self.owned:
            self.tensors = out.to(dtype).tensors
            self.owned = True
            self.loans = None
        return self


class BucketTape(Memory):
    """The recorded operators of the lists of one bucket, and the buffers of these lists.

    The tapes of one `family` share memory and are called siblings. Before a tape records its first
    node, its siblings run their pending operations. No tape holds a reference to another tape, so
    gradients are freed at the end of the step.

    Attributes:
        current: The value of each buffer after all recorded operations.
        loads: The value that was loaded from each buffer.
    """

    def clear(self) -> None:
        super().clear()
        self.current: dict[int, int] = {}
        self.loads: dict[int, int] = {}

    def operand(self, x: Any) -> NodeOperand | None:
        if isinstance(x, Taped) and x.on(self):
            return "value", x.value
        if isinstance(x, Lazy):  # reading it might run this tape
            return None
        return super().operand(x)

    def node(self, name: str, operands: tuple[NodeOperand, ...], dtype: torch.dtype) -> int:
        if not self.nodes:
            self.run_siblings()
        return super().node(name, operands, dtype)

    # ------------------------------------------------------------------ buffers

    def record(
        self, tensors: Sequence[Tensor], name: Hashable = None, owned: bool = True
    ) -> TensorList:
        """Return tensors as a list on this tape, or as a plain list if the tensors do not fit.

        The tensors fit if they have the shapes of the parameters and do not share memory.
        """
        i = self.hold(tensors, name) if len(tensors) == self.count else None
        if i is None or (i != GRADIENTS and not self.buffers[i].fits(self.buffers[PARAMETERS])):
            return TensorList(tensors, owned=owned)
        if name:
            self.lasting.add(i)
        return Taped(self, buffer=i, owned=owned)

    def load(self, buffer: int) -> int:
        """Return the value of a buffer after all recorded operations.

        Record a load if the buffer has not been loaded.
        """
        if buffer == WIDE_GRADIENTS:
            return self.cast(self.load(GRADIENTS), torch.float32)
        if buffer not in self.current:
            if buffer == WIDE:
                halves = ("value", self.load(PARAMETERS)), ("value", self.load(self.beside))
                loaded = self.node("wide_of", halves, torch.float32)
            else:
                dtype = self.buffers[buffer].dtype
                loaded = self.node("load", (("buffer", buffer),), dtype)
            self.current[buffer] = self.loads[buffer] = loaded
        return self.current[buffer]

    def pending(self, buffer: int) -> bool:
        """Return whether a recorded value must still be written to a buffer."""
        return buffer in self.current and self.current[buffer] != self.loads.get(buffer)

    # ------------------------------------------------------------------ running

    def run_siblings(self) -> None:
        """Run the pending operations of the sibling tapes.

        Afterwards this tape can read the results of the siblings. A sibling is another tape of the
        family.
        """
        for tape in [x for x in self.family if x is not self and x.nodes]:
            tape.run()

    def keep_up(self) -> None:
        """Run the recorded nodes at once if they use tensors that the running rule has read.

        The rule may read or write these tensors before and after every call.
        """
        if self.taken and not self.taken.isdisjoint(self.current):
            self.run()

    def run(self, measured: Measurement = None, rows: SliceRows | None = None) -> Tensor | None:
        """Run all recorded operations, and return the statistics of a measurement.

        Afterwards, the values of all lists that still exist are in buffers.
        """
        used = {cell.buffer for cell in self.cells}
        due = [i for i in self.current if self.pending(i) and (i in used or i not in self.spares)]
        stores = {i: self.current[i] for i in due}
        self._place(stores, used)
        if self.skip and not self.lasting.isdisjoint(stores):
            self._unless(self.skip.on(self.device), stores)
        nodes = {i: self.nodes[value] for i, value in stores.items()}
        copied = {i: operands[0][1] for i, (name, operands) in nodes.items() if name == "load"}
        stats = None
        if measured or len(copied) < len(stores) or set(copied.values()) & set(stores):
            stats = self._launch(stores, measured, rows or self.rows)
        else:  # copies of buffers need no program
            for i, source in copied.items():
                foreach("copy_", self.buffers[i].tensors, self.buffers[source].tensors)
        self.clear()
        return stats

    def _place(self, stores: dict[int, int], used: set[int | None]) -> None:
        """Assign spare buffers to the cells without a buffer, in the order of their creation."""
        for cell in [cell for cell in self.cells if cell.buffer is None]:
            cell.buffer = self._spare(self.dtypes[cell.value], used)
            stores[cell.buffer] = cell.value
            used.add(cell.buffer)

    def _unless(self, flag: Tensor, stores: dict[int, int]) -> None:
        """Make the stores to lasting buffers conditional. If a flag is set, keep the old values."""
        flags = self.whole(flag.expand(self.count).contiguous())
        for i in sorted(stores.keys() & self.lasting):
            dtype = self.buffers[i].dtype
            old = self.loads[i] if i in self.loads else self.node("load", (("buffer", i),), dtype)
            new = self.cast(stores[i], dtype)
            stores[i] = self.node("where", (("value", old), flags, ("value", new)), dtype)

    def _launch(
        self, stores: dict[int, int], measured: Measurement = None, rows: SliceRows | None = None
    ) -> Tensor | None:
        """Run a program that computes the given stores and measurement."""
        lists: list[list[Any]] = [self.buffers, self.numbers, self.vectors, self.scalars]
        dtypes = tuple(
            [tuple([x.dtype for x in xs]) for xs in (self.buffers, self.vectors, self.scalars)]
        )
        program, taken = program_of(
            tuple(self.nodes),
            tuple(stores.items()),
            measured,
            dtypes,
            self.device,
            rows is not None,
        )
        operands = [[xs[i] for i in indices] for xs, indices in zip(lists, taken, strict=True)]
        slices = rows if program.rows else None
        launch = Launch(program, self.sizes, self.elements, *operands, rows=slices)
        return self.runner.run(launch)

    def measure(self, x: Taped, m: Measure, rows: SliceRows | None = None) -> Tensor | None:
        """Return a statistic of each tensor of a list, or of each slice.

        The program that computes the list also computes the statistics. Return None if programs do
        not support this measure.
        """
        known = MEASURED.get((m.kind, m.p))
        if known is None or x.dtype not in SINGLE:
            return None
        if x.pending and self.rows != rows and self.rows:
            self.run()
        measured = known, x.value
        stats = self.run(measured, rows) if x.pending else self._launch({}, measured, rows)
        assert stats is not None
        if m.kind == "sum":
            stats = torch.cat([stats, torch.zeros_like(stats)])
        return stats

    def end(self) -> None:
        """Run all recorded operations, and end the step on this tape.

        Lists that still exist get separate memory, because the next step reuses spare buffers.
        """
        self.run()
        if self.runner.recorder is not None:
            return
        self.run_siblings()
        moved: dict[int, int] = {}
        for cell in self.cells:
            if cell.buffer is not None and cell.buffer in self.spares:
                if cell.buffer not in moved:
                    copies = [t.clone() for t in self.buffers[cell.buffer].tensors]
                    moved[cell.buffer] = self.hold(copies)
                cell.buffer = moved[cell.buffer]
