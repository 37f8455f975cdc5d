"""Tapes: lists note their operators, and one program runs them later.

A link runs as ever. Its lists are Taped: each operator adds a node to the tape of the bucket.
When values are needed, one program does all that was recorded, in a single pass over memory: at a
norm, at the end of the step, and where somebody reads the tensors of a list. Nothing else knows
that it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.lazy import Lazy
from torchzero_clip.core.norms import NAMED, Measure, SliceRows, statistics
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.torch_private import foreach
from torchzero_clip.engines.compiled.lists.memory import (
    GRADIENTS,
    PARAMETERS,
    WIDE,
    WIDE_GRADIENTS,
    Memory,
)
from torchzero_clip.engines.compiled.printers.program import (
    Launch,
    Measurement,
    NodeOperand,
    program_of,
)

MEASURED = {(m.kind, m.p): m for m in (NAMED["l1"], NAMED["l2"], NAMED["linf"], NAMED["sum"])}
"""The measures that programs take, in float64."""
SINGLE = (torch.float32, torch.bfloat16, torch.float16)


class Taped(Lazy):
    """A list on a tape: the values in a buffer, or a node whose values lie in no buffer yet."""

    __slots__ = ("_cell", "_tape")

    def __init__(
        self, tape: BucketTape, *, buffer: int | None = None, value: int = -1, owned: bool = True
    ) -> None:
        super().__init__()
        self._tape, self.owned = tape, owned
        self._cell = tape.cell(buffer, value)

    @property
    def buffer(self) -> int | None:
        """The buffer that the values are in; None where they are in no buffer yet."""
        return self._cell.buffer

    @property
    def value(self) -> int:
        """The node that holds the values now."""
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
        """The tensors; all that was recorded is done, since they may be written from now on."""
        if self.buffer in self._tape.current:
            self._tape.run()
        found = self.compute()
        assert self.buffer is not None
        self._tape.show(self.buffer)
        return self._tape.lent(self.buffer) if self.owned else found

    @tensors.setter
    def tensors(self, tensors: Sequence[Tensor]) -> None:
        self._cell = self._tape.cell(self._tape.hold(tensors))

    def compute(self) -> list[Tensor]:
        """The tensors, to be read at once: later they may hold the values of another list."""
        self._tape.run_others()
        if self.buffer in (WIDE, WIDE_GRADIENTS):  # whoever looks may do so to the end of the step
            value, buffer = self.value, self._tape.fresh(torch.float32)
            self._cell = self._tape.cell(buffer)
            self._tape.current[buffer] = value
        if self.pending:
            self._tape.run()
        assert self.buffer is not None
        return self._tape.buffers[self.buffer].tensors

    def __len__(self) -> int:
        return self._tape.count

    def statistics(self, m: Measure) -> Tensor:
        found = self._tape.measure(self, m)
        return statistics(self.compute(), m) if found is None else found

    def _row_statistics(self, rows: SliceRows, m: Measure) -> Tensor | None:
        return self._tape.measure(self, m, rows) if rows.whole else None

    def on(self, tape: BucketTape) -> bool:
        """Whether this list is of that tape."""
        return self._tape is tape

    def forget(self) -> None:
        """Let go of the values: no buffer needs to hold them."""
        self._cell, self.owned = self._tape.cell(PARAMETERS), False

    # ------------------------------------------------------------------ memory

    def borrow(self) -> Taped:
        borrowed = self._like(-1, PARAMETERS, owned=False)
        borrowed._cell = self._cell
        return self._lend(borrowed)

    def _like(self, value: int, buffer: int | None = None, owned: bool = True) -> Taped:
        """Another list, to be measured as this one is."""
        made = Taped(self._tape, buffer=buffer, value=value, owned=owned)
        made.measure = self.measure
        self._tape.keep_up()
        return made

    def own(self) -> Taped:
        return self if self.owned else self._assign(self.value)

    def to(self, dtype: torch.dtype) -> Taped:
        if self.dtype == dtype:
            return self
        if self.buffer == GRADIENTS and dtype == torch.float32 and not self.owned:
            return self._like(-1, WIDE_GRADIENTS, owned=False)
        made = Taped(self._tape, value=self._tape.cast(self.value, dtype))
        self._tape.keep_up()
        return made

    def clone(self) -> Taped:
        return self._like(self.value)

    def copy_(self, source: TensorList) -> TensorList:
        if isinstance(source, Taped) and source.on(self._tape):
            return self._assign(self._tape.cast(source.value, self.dtype))
        return self._plainly(lambda plain: plain.copy_(source))

    def _assign(self, value: int) -> Taped:
        """Take a value: in the cell that is this list's own, otherwise in a new one."""
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
        # Nothing may run here: the owner is about to take a value that is only recorded.
        self._move_to_cell(self.value)

    def _move_to_cell(self, value: int) -> None:
        """Take a value in a new cell of this list's own."""
        self._cell = self._tape.cell(value=value)
        self.owned = True
        self.loans = None

    # ------------------------------------------------------------------ operators

    def over_(self, ratio: Any) -> bool:
        """Divide by a ratio of any size; returns whether a program takes it."""
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
        if name == "addcmul" and operands[2:]:  # the product of all three, whatever the third is
            operands = (self._promoted(operands[0]).mul(operands[2]), operands[1])
        value = self._tape.add(name, self.value, operands, keep_dtype=True)
        if value is not None:
            return self._assign(value)
        return self._plainly(lambda plain: plain._write(name, *operands))

    def _plainly(self, write: Callable[[TensorList], TensorList]) -> Taped:
        """Have a plain list of the tensors written, which moves where these are borrowed."""
        dtype = self.dtype
        if self.owned:
            self._unshare()
        out = write(TensorList(self.tensors, owned=self.owned))
        if not self.owned:
            self.tensors, self.owned = out.to(dtype).tensors, True
            self.loans = None
        return self


class BucketTape(Memory):
    """What was asked of the lists of one bucket, and the buffers that its values lie in.

    Those of one `family` share memory: writing on one runs what is on the others. None holds
    another, so that gradients are let go with the step.
    """

    def clear(self) -> None:
        super().clear()
        self.current: dict[int, int] = {}  # the value that belongs into each buffer by now
        self.loads: dict[int, int] = {}

    def operand(self, x: Any) -> NodeOperand | None:
        if isinstance(x, Taped) and x.on(self):
            return "value", x.value
        return None if isinstance(x, Lazy) else super().operand(x)  # reading it might run this one

    def node(self, name: str, operands: tuple[NodeOperand, ...], dtype: torch.dtype) -> int:
        if not self.nodes:
            self.run_others()
        return super().node(name, operands, dtype)

    # ------------------------------------------------------------------ buffers

    def record(
        self, tensors: Sequence[Tensor], name: Hashable = None, owned: bool = True
    ) -> TensorList:
        """Tensors as a list of this tape; a plain one where they are not like the parameters."""
        i = self.hold(tensors, name) if len(tensors) == self.count else None
        if i is None or (i != GRADIENTS and not self.buffers[i].fits(self.buffers[PARAMETERS])):
            return TensorList(tensors, owned=owned)
        self.lasting |= {i} if name else set()
        return Taped(self, buffer=i, owned=owned)

    def load(self, buffer: int) -> int:
        """The value that is in a buffer by now."""
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
        """Whether a recorded value is still to be written to this buffer."""
        return buffer in self.current and self.current[buffer] != self.loads.get(buffer)

    # ------------------------------------------------------------------ running

    def run_others(self) -> None:
        """Run the nodes of the others of this family."""
        for tape in [x for x in self.family if x is not self and x.nodes]:
            tape.run()

    def keep_up(self) -> None:
        """Run at once what reads or writes memory whose tensors the running rule has taken.

        The rule may look at the tensors, or write them, before and after every call.
        """
        if self.taken and not self.taken.isdisjoint(self.current):
            self.run()

    def run(self, measured: Measurement = None, rows: SliceRows | None = None) -> Tensor | None:
        """Run what was recorded; then a buffer backs every list that is still referenced."""
        used = {cell.buffer for cell in self.cells}
        due = [i for i in self.current if self.pending(i) and (i in used or i not in self.spares)]
        stores = {i: self.current[i] for i in due}
        self._place(stores, used)
        if self.skip and not self.lasting.isdisjoint(stores):
            self._unless(self.skip.on(self.device), stores)
        made = {i: self.nodes[value] for i, value in stores.items()}
        copied = {i: node[1][0][1] for i, node in made.items() if node[0] == "load"}
        stats = None
        if measured or len(copied) < len(stores) or set(copied.values()) & set(stores):
            stats = self._launch(stores, measured, rows or self.rows)
        else:  # nothing but copies, which need no program
            for i, source in copied.items():
                foreach("copy_", self.buffers[i].tensors, self.buffers[source].tensors)
        self.clear()
        return stats

    def _place(self, stores: dict[int, int], used: set[int | None]) -> None:
        """Give every cell without memory a spare buffer, in the order in which they were made."""
        for cell in [cell for cell in self.cells if cell.buffer is None]:
            cell.buffer = self._spare(self.dtypes[cell.value], used)
            stores[cell.buffer] = cell.value
            used.add(cell.buffer)

    def _unless(self, flag: Tensor, stores: dict[int, int]) -> None:
        """Store what is there already, where a flag is set, in the buffers that last."""
        which = self.whole(flag.expand(self.count).contiguous())
        for i in sorted(stores.keys() & self.lasting):
            dtype = self.buffers[i].dtype
            old = self.loads[i] if i in self.loads else self.node("load", (("buffer", i),), dtype)
            new = self.cast(stores[i], dtype)
            stores[i] = self.node("where", (("value", old), which, ("value", new)), dtype)

    def _launch(
        self, stores: dict[int, int], measured: Measurement = None, of: SliceRows | None = None
    ) -> Tensor | None:
        rows: list[list[Any]] = [self.buffers, self.numbers, self.vectors, self.scalars]
        dtypes = tuple([tuple([x.dtype for x in row]) for row in (rows[0], *rows[2:])])
        what = tuple(self.nodes), tuple(stores.items()), measured
        program, taken = program_of(*what, dtypes, self.device, of is not None)
        given = [[row[i] for i in some] for row, some in zip(rows, taken, strict=True)]
        known = of if program.rows else None
        return self.runner.run(Launch(program, self.sizes, self.elements, *given, rows=known))

    def measure(self, x: Taped, m: Measure, rows: SliceRows | None = None) -> Tensor | None:
        """The statistic of each tensor of a list, or of its slices, by the program that makes it.

        None where none does.
        """
        known = MEASURED.get((m.kind, m.p))
        if known is None or x.dtype not in SINGLE:
            return None
        if x.pending and self.rows != rows and self.rows:
            self.run()
        wanted = known, x.value
        stats = self.run(wanted, rows) if x.pending else self._launch({}, wanted, rows)
        assert stats is not None
        if m.kind == "sum":
            stats = torch.cat([stats, torch.zeros_like(stats)])
        return stats

    def end(self) -> None:
        """Run; lists that outlive the step get memory of their own: spare buffers are reused."""
        self.run()
        if self.runner.recorder is not None:
            return
        self.run_others()
        moved: dict[int, int] = {}
        for cell in self.cells:
            if cell.buffer is not None and cell.buffer in self.spares:
                if cell.buffer not in moved:
                    copies = [t.clone() for t in self.buffers[cell.buffer].tensors]
                    moved[cell.buffer] = self.hold(copies)
                cell.buffer = moved[cell.buffer]
