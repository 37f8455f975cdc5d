"""Pointer tables: addresses, layouts and numbers that kernels read on a GPU.

A kernel does not receive each tensor as an argument. Instead, the kernel reads the addresses of all
tensors from a table on the device. The object `TABLES` caches the latest tables. It sends a table
to the device only if the content of the table is new.

Tables are copied through pinned host memory. A piece of pinned memory is not overwritten before the
copy from it has finished. During the capture of a CUDA graph, the host sends nothing. Instead,
kernels receive the numbers as arguments and write the new tables.
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

CHUNK = 4096  # elements of a tensor per Triton program; triton_include.py has the same number
ROW = 16384  # elements of a slice per Triton program
LONG = 2**27  # from this many elements on, a tensor or a slice gets larger chunks
WIDE_LOADS = 16  # bytes; addresses that are multiples of it can be read 128 bits at a time
IS_ODD = bytes([n % WIDE_LOADS != 0 for n in range(256)])
TABLES_KEPT = 64  # of each kind
PINNED_PIECES = 64  # pieces of pinned memory in use, enough for a dozen steps
DTYPES = {"q": torch.int64, "d": torch.float64}
"""For each typecode of an array on the host, the dtype of the array on the device."""
T = TypeVar("T")


class Chunks(NamedTuple):
    """The division of tensors into chunks. Each Triton program processes one chunk.

    The division depends on the sizes of the tensors and on whether their addresses are aligned. It
    does not depend on the addresses themselves.

    Attributes:
        layout: A table. Row 0 has the size of each tensor (or slice). Row 1 has the index of the
            first chunk of each tensor (or slice). For slices, row 2 has the tensor of each slice,
            and row 3 has the element of the tensor at which the slice begins.
        chunks: For each Triton program: the index of a tensor (or slice), and the index of a chunk
            of this tensor.
        launches: For each launch: whether all addresses are aligned, the first Triton program, and
            the number of Triton programs.
        total: The number of chunks.
        alone: Whether each tensor or slice is a single chunk.
    """

    layout: Tensor
    chunks: Tensor
    launches: list[tuple[bool, int, int]]
    total: int
    alone: bool = False


class Pinned:
    """A piece of pinned memory, with an event that marks the end of the copy from it."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.memory = torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
        self.event = torch.cuda.Event()


class Ring:
    """Pieces of pinned memory that are used in turn. A piece with a running copy is skipped."""

    def __init__(self, make: Callable[[int, torch.dtype], Any] = Pinned) -> None:
        self._make = make
        self._pieces: list[Any] = []  # the piece that was used last is at the end

    def send(self, words: Tensor, out: Tensor) -> None:
        """Copy `words` to the tensor `out` on a device, without synchronizing with the device."""
        piece = self._free(len(words), words.dtype)
        pinned = piece.memory[: len(words)]
        pinned.copy_(words)
        out.copy_(pinned, non_blocking=True)
        piece.event.record()
        self._pieces.append(piece)

    def _free(self, size: int, dtype: torch.dtype) -> Any:
        """Return a piece whose copy has finished. Make a new piece if there is none."""
        for i, piece in enumerate(self._pieces):
            if piece.memory.dtype == dtype and len(piece.memory) >= size and piece.event.query():
                return self._pieces.pop(i)
        if len(self._pieces) >= PINNED_PIECES:
            self._pieces.pop(0).event.synchronize()
        return self._make(max(size, 64), dtype)


class DeviceTables:
    """A cache of the tables that kernels read. The key of a table is its content."""

    def __init__(self) -> None:
        self._rings: dict[torch.device, Ring] = {}
        self._known = defaultdict[str, dict[tuple[Hashable, int], Any]](dict)
        # tables that CUDA graphs read; they are never freed, because a graph's end is not reported
        self.captured: list[Any] = []
        self.lock = RLock()  # a parameter may step in a thread of the backward pass

    def numbers(self, numbers: Sequence[float], like: Tensor) -> Tensor:
        """Return numbers as a vector on the device of a tensor."""
        return self.words(array("d", numbers), like)

    def words(self, words: array[Any], like: Tensor) -> Tensor:
        """Return an array as a vector on the device of a tensor.

        The vector is shared, so the caller must not write to it.
        """
        form = words.typecode, words.tobytes()
        return self._find("numbers", form, like, lambda: self._sent(words, like))

    def send(self, numbers: Sequence[float], out: Tensor) -> None:
        """Write numbers into the vector `out`, which may be on any device."""
        with self.lock, on(out.device):
            self._write(array("d", numbers), out)

    def table(
        self, buffers: Sequence[Buffer], sizes: Sequence[int], rows: SliceRows | None = None
    ) -> tuple[Tensor, Chunks]:
        """Return the addresses of the buffers as a table on the device, and the layout.

        The table has one row for each buffer. The layout divides tensors of these sizes into
        chunks. With `rows`, the layout divides the slices instead of whole tensors.
        """
        like = buffers[0].tensors[0]
        lengths = array("q", sizes)
        count = len(lengths)
        addresses = array("q")
        for buffer in buffers:
            addresses.frombytes(buffer.addresses.tobytes())
        step = min([buffer.dtype.itemsize for buffer in buffers])

        def make() -> tuple[Tensor, Chunks]:
            """Send the addresses. Gradients with new addresses often have a known layout."""
            starts = addresses[:]
            if rows is not None:  # each slice begins at the end of the slice before
                starts += array("q", [n * step for n in rows.lengths])
            last = starts.tobytes()[:: starts.itemsize]  # the lowest byte of each address
            # all lowest bytes of a buffer as one integer, so that one operation joins two buffers
            each = [int.from_bytes(last[i : i + count], "big") for i in range(0, len(last), count)]
            odd = reduce(operator.or_, each).to_bytes(count, "big").translate(IS_ODD)
            form = odd, lengths.tobytes(), rows
            layout = self._find("layouts", form, like, lambda: self._lay(odd, lengths, like, rows))
            return self._sent(addresses, like), layout

        form = addresses.tobytes(), lengths.tobytes(), step, rows
        return self._find("tables", form, like, make)

    def _find(self, kind: str, form: Hashable, like: Tensor, make: Callable[[], T]) -> T:
        """Return the cached table with the key `form`, or make the table.

        Tables are cached per stream, because a stream does not wait for a copy in another stream.
        The capture of a CUDA graph may use the tables of all streams, because all copies are done
        when the capture begins. The tables of a CUDA graph are never freed.
        """
        key = form, like.device, fake_mode(like)
        with self.lock, on(like.device):
            known = self._known[kind]
            stream = _stream(like.device)
            if capturing(like.device):
                found = next((x for (k, _), x in known.items() if k == key), None)
                self.captured.append(make() if found is None else found)
                return self.captured[-1]
            table = known.pop((key, stream), None)
            table = make() if table is None else table
            while len(known) >= TABLES_KEPT:
                del known[next(iter(known))]
            known[key, stream] = table
            return table

    def _lay(self, odd: bytes, sizes: array[int], like: Tensor, rows: SliceRows | None) -> Chunks:
        """Return a layout. The first launch of the layout has the tensors at aligned addresses."""
        count = len(sizes)
        if rows is None:
            per_chunk = CHUNK
            lengths = sizes
            chunks = [-(-n // span(n, CHUNK)) for n in sizes]
        else:
            per_chunk = ROW
            # a tensor of size 0 is skipped by the launch
            pairs = zip(rows.lengths, sizes, strict=True)
            lengths = array("q", [n if size else 0 for n, size in pairs])
            rows_of = zip(lengths, rows.counts, strict=True)
            chunks = [-(-n // span(n, ROW)) * slices for n, slices in rows_of]
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
        programs = self._chunks(layout, turns, total, per_chunk)
        used = [launch for launch in launches if launch[2]]
        alone = all([0 < n <= per_chunk for n in lengths])
        return Chunks(layout, programs, used, total, alone)

    def _of_rows(self, first: Tensor, sizes: Tensor, rows: SliceRows) -> Tensor:
        """Compute the layout of slices on the device, from the first chunk of each tensor."""
        lengths, counts = sizes.view(2, -1)
        tensor = torch.repeat_interleave(counts, output_size=sum(rows.counts))
        begin = counts.cumsum(0) - counts
        which = torch.arange(len(tensor), device=counts.device) - begin[tensor]
        length = lengths[tensor]
        chunk = first[tensor] + which * ((length - 1) // span(length, ROW) + 1)
        return torch.cat([length, chunk, tensor, which * length])

    def _chunks(self, layout: Tensor, order: Tensor, total: int, per_chunk: int) -> Tensor:
        """Compute the tensor of each chunk, and the index of the chunk in this tensor."""
        sizes, first = layout.view(-1, len(order))[:2]
        counts = ((sizes - 1) // span(sizes, per_chunk) + 1)[order]
        tensor = torch.repeat_interleave(order, counts, output_size=total)
        which = torch.arange(total, device=layout.device) - first[tensor]
        return torch.stack([tensor, which], dim=1).to(torch.int32).view(-1)

    def _sent(self, words: array[Any], like: Tensor) -> Tensor:
        """Return an array as a new vector on the device of a tensor."""
        out = like.new_empty(len(words), dtype=DTYPES[words.typecode], requires_grad=False)
        self._write(words, out)
        return out

    def _write(self, words: array[Any], out: Tensor) -> None:
        """Write an array into a vector on any device."""
        if fake_mode(out) is not None:
            out.copy_(torch.empty(len(words), dtype=out.dtype, device="cpu"))
        elif capturing(out.device):
            foreach("add_", list(out.zero_().unbind()), words.tolist())
        elif out.device.type == "cpu":
            out.copy_(torch.frombuffer(words, dtype=out.dtype))
        else:
            ring = self._rings.setdefault(out.device, Ring())
            ring.send(torch.frombuffer(words, dtype=out.dtype), out)


def span(size: Any, per_chunk: int) -> Any:
    """Return the number of elements per chunk, for a tensor of this size.

    `span_of` in triton_include.py computes the same.
    """
    return per_chunk * (1 + size // LONG)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a device is the current GPU, as kernels and streams require."""
    current = not _is_real(device) or device.index == torch.cuda.current_device()
    return nullcontext() if current else torch.cuda.device(device)


def _is_real(device: torch.device) -> bool:
    """Return whether a device is a GPU that CUDA has initialized."""
    return device.type == "cuda" and torch.cuda.is_initialized()


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on a device."""
    return _is_real(device) and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    """Return the current stream of a device; 0 if it has none."""
    return torch.cuda.current_stream(device).cuda_stream if _is_real(device) else 0


TABLES = DeviceTables()
