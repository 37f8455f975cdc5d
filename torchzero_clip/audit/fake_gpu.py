"""An imagined GPU: tensors on `cuda:0` that have a form and no values, whatever torch is built for.

torch's fake tensors do nearly all of it. Indexing, and copies from one device to another, ask for
the guard of a device, which is not there, or asks for a driver: it gets the one of the CPU, which
does nothing, or does without where torch does not show where guards lie.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.audit.python_reads import Spoken
from torchzero_clip.core.torch_private import (
    FakeTensor,
    FakeTensorMode,
    schema,
    taken_for_plain,
    tree_leaves,
)

CPU, CUDA = 0, 1  # as c10 numbers kinds of devices
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # a pointer for each kind of device
C10 = {"darwin": "libc10.dylib", "win32": "c10.dll"}
ALIGNED = 512  # where CUDA's allocator begins a tensor


class Imagined(FakeTensorMode):  # type: ignore[misc, valid-type, unused-ignore]
    """Fake tensors whose memory has addresses, so that it can be told whether two share some."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._next, self._free = ALIGNED, dict[int, list[int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = schema(func)
        if told.is_mutable and not told.returns:  # it writes, and makes nothing
            given = tree_leaves((args, kwargs))
            if any([isinstance(t, Tensor) and t.is_cuda for t in given]):
                return None
        out = super().__torch_dispatch__(func, types, args, kwargs or {})
        for t in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(t, Tensor) and not hasattr(memory := t.untyped_storage(), "address"):
                self._place(memory)
        return out

    def _place(self, memory: torch.UntypedStorage) -> None:
        """Give memory an address: one where memory of this size was, as CUDA's allocator does."""
        size = -(-max(memory.nbytes(), 1) // ALIGNED) * ALIGNED
        free = self._free.setdefault(size, [])
        if not free:
            free.append(self._next)
            self._next += size
        vars(memory)["address"] = address = free.pop()
        weakref.finalize(memory, free.append, address)


@contextmanager
def fake_cuda() -> Iterator[Imagined]:
    """A block in which every tensor that is made is fake, and `cuda:0` is a device.

    Nothing is computed. A number that the host asks for is not there: see `Ledger`.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise RuntimeError(f"fake CUDA tensors need torch 2.9 or newer, got {torch.__version__}")
    with taken_for_plain(FakeTensor), Imagined() as mode, Spoken(guarded=_guard()):
        yield mode


def twin(params: Any, device: str = "cuda:0") -> list[torch.nn.Parameter]:
    """Fake parameters like these, with gradients where they are not frozen: inside `fake_cuda`."""
    made = []
    for p in params:
        moves = p.requires_grad or not isinstance(p, torch.nn.Parameter)
        empty = torch.empty(p.shape, dtype=p.dtype, device=device)
        made.append(torch.nn.Parameter(empty, requires_grad=moves))
        made[-1].grad = torch.empty_like(empty) if moves else None
    return made


@cache
def _guard() -> bool:
    """Give CUDA a guard that does nothing where no GPU is; False where that cannot be done."""
    if torch.cuda.is_available():
        return True
    library = Path(torch.__file__).parent / "lib" / C10.get(sys.platform, "libc10.so")
    try:
        guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(ctypes.CDLL(str(library)), GUARDS)
    except (OSError, ValueError):
        return False
    guards[CUDA] = guards[CPU]  # that of a build for CUDA asks for a driver
    return True
