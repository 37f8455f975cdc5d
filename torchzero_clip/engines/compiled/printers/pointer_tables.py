"""Tables: where tensors lie, on their device, sent there when it is another than before.

What is sent goes through pinned memory, which is not written again before the copy from it is done.
In a graph that is being captured nothing is sent: what no step before had stands there as arguments
of kernels.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from threading import RLock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchzero_clip.core.norms import SliceRows
from torchzero_clip.core.torch_private import fake_mode, foreach
from torchzero_clip.engines.buffers import Buffer

CHUNK = 4096  # entries that a program of the grid takes: kernel.py has the same
ROW = 16384  # the same where they are of a slice
LONG = 2**27  # entries of a tensor, or a slice, with which they are more
WIDE_LOADS = 16  # bytes; addresses that are multiples of it can be read 128 bits at a time
IS_ODD = bytes([n % WIDE_LOADS != 0 for n in range(256)])
MOST = 64  # tables that are remembered, and lists of numbers
PIECES = 64  # pieces of pinned memory before one is waited for: those of a dozen steps and more
DTYPES = {"q": torch.int64, "d": torch.float64}
T = TypeVar("T")


class Chunks(NamedTuple):
    """How tensors of some sizes are divided among programs, wherever they lie.

    Attributes:
        layout: The size of each tensor, or of each slice, and in another row the first of its
            chunks. Of slices come two more rows: their tensors, and where they begin in these.
        chunks: For each program of the grid a tensor or a slice, and which of its chunks.
        launches: Whether all addresses are aligned, the first program, and how many.
        total: The count of chunks.
        alone: Whether each tensor or slice is one chunk.
    """

    layout: Tensor
    chunks: Tensor
    launches: list[tuple[bool, int, int]]
    total: int
    alone: bool = False


class Pinned:
    """Pinned memory, and when the copy from it is done."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.memory = torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
        self.event = torch.cuda.Event()


class Ring:
    """Pinned memory that is taken in turn; a piece whose copy is under way is let be."""

    def __init__(self, make: Callable[[int, torch.dtype], Any] = Pinned) -> None:
        self._make = make
        self._pieces: list[Any] = []  # the one that was taken last at the end

    def send(self, words: Tensor, out: Tensor) -> None:
        """Copy to a device without waiting for it."""
        piece = self._free(len(words), words.dtype)
        pinned = piece.memory[: len(words)]
        pinned.copy_(words)
        out.copy_(pinned, non_blocking=True)
        piece.event.record()
        self._pieces.append(piece)

    def _free(self, size: int, dtype: torch.dtype) -> Any:
        for i, piece in enumerate(self._pieces):
            if piece.memory.dtype == dtype and len(piece.memory) >= size and piece.event.query():
                return self._pieces.pop(i)
        if len(self._pieces) >= PIECES:
            self._pieces.pop(0).event.synchronize()
        return self._make(max(size, 64), dtype)


class DeviceTables:
    """What kernels read besides the tensors of a step, remembered by what it says."""

    def __init__(self) -> None:
        self._rings: dict[torch.device, Ring] = {}
        self._known = defaultdict[str, dict[tuple[Hashable, int], Any]](dict)
        self.captured: list[Any] = []  # what graphs of others read: nobody tells when they go
        self.lock = RLock()  # a parameter may step in a thread of the backward pass

    def numbers(self, numbers: Sequence[float], like: Tensor) -> Tensor:
        """Numbers as a vector on the device of a tensor."""
        return self.words(array("d", numbers), like)

    def words(self, words: array[Any], like: Tensor) -> Tensor:
        """Words as a vector on the device of a tensor, which nobody writes."""
        form = words.typecode, words.tobytes()
        return self._find("numbers", form, like, lambda: self._sent(words, like))

    def send(self, numbers: Sequence[float], out: Tensor) -> None:
        """Write numbers into a vector on its device."""
        with self.lock, on(out.device):
            self._write(array("d", numbers), out)

    def table(
        self, buffers: Sequence[Buffer], sizes: Sequence[int], rows: SliceRows | None = None
    ) -> tuple[Tensor, Chunks]:
        """A row of addresses for each buffer, and the layout of these sizes, or rows."""
        like, lengths = buffers[0].tensors[0], array("q", sizes)
        addresses, count = array("q"), len(lengths)
        for buffer in buffers:
            addresses.frombytes(buffer.addresses.tobytes())
        step = min([buffer.dtype.itemsize for buffer in buffers])

        def make() -> tuple[Tensor, Chunks]:
            """Addresses are sent, as gradients lie elsewhere; sizes and alignment are known."""
            starts = addresses[:]
            if rows is not None:  # each slice begins where the one before it ends
                starts += array("q", [n * step for n in rows.lengths])
            last = starts.tobytes()[:: starts.itemsize]  # of each the lowest byte
            each = [int.from_bytes(last[i : i + count], "big") for i in range(0, len(last), count)]
            odd = reduce(operator.or_, each).to_bytes(count, "big").translate(IS_ODD)
            form = odd, lengths.tobytes(), rows
            layout = self._find("layouts", form, like, lambda: self._lay(odd, lengths, like, rows))
            return self._sent(addresses, like), layout

        form = addresses.tobytes(), lengths.tobytes(), step, rows
        return self._find("tables", form, like, make)

    def _find(self, kind: str, form: Hashable, like: Tensor, make: Callable[[], T]) -> T:
        """What is known of a form, or what is made now; while a graph is captured it lasts.

        A stream does not wait for what another one sends, but a capture begins when all is there.
        """
        key = form, like.device, fake_mode(like)
        with self.lock, on(like.device):
            known, stream = self._known[kind], _stream(like.device)
            if capturing(like.device):
                found = next((x for (k, _), x in known.items() if k == key), None)
                self.captured.append(make() if found is None else found)
                return self.captured[-1]
            found = known.pop((key, stream), None)
            found = make() if found is None else found
            while len(known) >= MOST:
                del known[next(iter(known))]
            known[key, stream] = found
            return found

    def _lay(self, odd: bytes, sizes: array[int], like: Tensor, rows: SliceRows | None) -> Chunks:
        """The layout; a launch is of tensors that all begin at 16 bytes, or of the others."""
        count = len(sizes)
        most, many, lengths = CHUNK, [1] * count, sizes
        if rows is not None:
            most, many = ROW, list(rows.counts)
            each = zip(rows.lengths, sizes, strict=True)
            lengths = array("q", [n if size else 0 for n, size in each])
        chunks = [-(-n // span(n, most)) * k for n, k in zip(lengths, many, strict=True)]
        order = sorted(range(count), key=odd.__getitem__)  # aligned ones first
        begins = itertools.accumulate([chunks[i] for i in order], initial=0)
        first = dict(zip(order, begins, strict=False))
        total = sum(chunks)
        aligned = sum([n for n, is_odd in zip(chunks, odd, strict=True) if not is_odd])
        launches = [(True, 0, aligned), (False, aligned, total - aligned)]
        words = array("q", [*sizes, *[first[i] for i in range(count)], *order])
        if rows is not None:
            words += lengths + array("q", rows.counts)
        sent = self._sent(words, like)
        layout, turns, more = sent.split([2 * count, count, len(sent) - 3 * count])
        if rows is not None:
            layout = self._of_rows(layout[count:], more, rows)
            turns = layout.view(4, -1)[1].argsort(stable=True)
        which = self._chunks(layout, turns, total, most)
        used = [launch for launch in launches if launch[2]]
        alone = all([0 < n <= most for n in lengths])
        return Chunks(layout, which, used, total, alone)

    def _of_rows(self, first: Tensor, sizes: Tensor, rows: SliceRows) -> Tensor:
        """The layout of slices, computed on the device from the first chunks of tensors."""
        lengths, counts = sizes.view(2, -1)
        tensor = torch.repeat_interleave(counts, output_size=sum(rows.counts))
        begin = counts.cumsum(0) - counts
        which = torch.arange(len(tensor), device=counts.device) - begin[tensor]
        length = lengths[tensor]
        chunk = first[tensor] + which * ((length - 1) // span(length, ROW) + 1)
        return torch.cat([length, chunk, tensor, which * length])

    def _chunks(self, layout: Tensor, order: Tensor, total: int, most: int) -> Tensor:
        """For each chunk its tensor and which it is there, computed on the device."""
        sizes, first = layout.view(-1, len(order))[:2]
        many = ((sizes - 1) // span(sizes, most) + 1)[order]
        tensor = torch.repeat_interleave(order, many, output_size=total)
        which = torch.arange(total, device=layout.device) - first[tensor]
        return torch.stack([tensor, which], dim=1).to(torch.int32).view(-1)

    def _sent(self, words: array[Any], like: Tensor) -> Tensor:
        """Words on the device of a tensor."""
        out = like.new_empty(len(words), dtype=DTYPES[words.typecode], requires_grad=False)
        self._write(words, out)
        return out

    def _write(self, words: array[Any], out: Tensor) -> None:
        if fake_mode(out) is not None:
            out.copy_(torch.empty(len(words), dtype=out.dtype, device="cpu"))
        elif capturing(out.device):
            foreach("add_", list(out.zero_().unbind()), words.tolist())
        elif out.device.type == "cpu":
            out.copy_(torch.frombuffer(words, dtype=out.dtype))
        else:
            ring = self._rings.setdefault(out.device, Ring())
            ring.send(torch.frombuffer(words, dtype=out.dtype), out)


def span(size: Any, most: int) -> Any:
    """How many entries of a tensor of this size a program takes: `span_of` of kernel.py."""
    return most * (1 + size // LONG)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where kernels of this device begin, and where its stream is asked about."""
    there = not _is_real(device) or device.index == torch.cuda.current_device()
    return nullcontext() if there else torch.cuda.device(device)


def _is_real(device: torch.device) -> bool:
    """Whether this is a GPU that is there."""
    return device.type == "cuda" and torch.cuda.is_initialized()


def capturing(device: torch.device) -> bool:
    """Whether what happens now on a device is not done but captured."""
    return _is_real(device) and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    """The stream that works for this device now."""
    return torch.cuda.current_stream(device).cuda_stream if _is_real(device) else 0


TABLES = DeviceTables()
