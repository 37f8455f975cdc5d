"""A fake GPU: tensors on `cuda:0` that have a shape but no values, on a machine without CUDA.

torch's fake tensors do nearly all of the work. Indexing and copies between devices also need a
device guard, which is a C++ object that selects the device. Without CUDA there is no such guard. In
a CUDA build of torch, the guard calls the driver. So the fake GPU gets the guard of the CPU, which
does nothing. If this build of torch does not export the table of guards, `python_reads` replaces
the methods that need a guard.
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

from torchzero_clip.audit.python_reads import PythonReads
from torchzero_clip.core.torch_private import (
    FakeTensor,
    FakeTensorMode,
    schema,
    taken_for_plain,
    tree_leaves,
)

CPU = 0  # the number of this kind of device in c10
CUDA = 1
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""The name of c10's table of device guards. It has a pointer for each kind of device."""
C10 = {"darwin": "libc10.dylib", "win32": "c10.dll"}
ALIGNMENT = 512
"""The address of every tensor is a multiple of this number of bytes, as with CUDA's allocator."""


class FakeMemory(FakeTensorMode):  # type: ignore[misc, valid-type, unused-ignore]
    """A mode whose fake tensors have memory addresses, to show which tensors share memory."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._next = ALIGNMENT
        self._free: dict[int, list[int]] = {}  # the addresses of freed memory, by size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = schema(func)
        if operator.is_mutable and not operator.returns:
            # It only writes, and there are no values to write.
            arguments = tree_leaves((args, kwargs))
            if any([isinstance(t, Tensor) and t.is_cuda for t in arguments]):
                return None
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        for t in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(t, Tensor) and not hasattr(memory := t.untyped_storage(), "address"):
                self._place(memory)
        return result

    def _place(self, memory: torch.UntypedStorage) -> None:
        """Give memory an address. Reuse the addresses of freed memory, as CUDA's allocator does."""
        size = -(-max(memory.nbytes(), 1) // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(size, [])
        if not free:
            free.append(self._next)
            self._next += size
        address = free.pop()
        vars(memory)["address"] = address
        weakref.finalize(memory, free.append, address)


@contextmanager
def fake_cuda() -> Iterator[FakeMemory]:
    """Return a context manager in which all new tensors are fake and the device `cuda:0` exists.

    Nothing is computed, and tensors have no values. To read values on the host, open a `Ledger`
    inside the block. `fake_cuda` needs torch 2.9 or newer.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import fake_cuda
        >>> with fake_cuda():
        ...     print((torch.ones(2, 3, device="cuda:0") + 1).shape)
        torch.Size([2, 3])
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
        raise RuntimeError(f"fake CUDA tensors need torch 2.9 or newer, got {torch.__version__}")
    with taken_for_plain(FakeTensor), FakeMemory() as mode, PythonReads(guarded=_has_guard()):
        yield mode


def twin(params: Any, device: str = "cuda:0") -> list[torch.nn.Parameter]:
    """Return fake copies of the parameters. Call it inside a block of `fake_cuda`.

    Each copy has the shape and dtype of the parameter. It also has a gradient, unless the parameter
    is frozen.

    Args:
        params: Parameters or tensors on any device.
        device: The device of the copies.
    """
    copies = []
    for p in params:
        trains = p.requires_grad or not isinstance(p, torch.nn.Parameter)
        empty = torch.empty(p.shape, dtype=p.dtype, device=device)
        copied = torch.nn.Parameter(empty, requires_grad=trains)
        copied.grad = torch.empty_like(empty) if trains else None
        copies.append(copied)
    return copies


@cache
def _has_guard() -> bool:
    """Return whether CUDA has a device guard. Without a GPU, CUDA first gets the CPU's guard."""
    if torch.cuda.is_available():
        return True
    library = Path(torch.__file__).parent / "lib" / C10.get(sys.platform, "libc10.so")
    try:
        guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(ctypes.CDLL(str(library)), GUARDS)
    except (OSError, ValueError):
        return False
    guards[CUDA] = guards[CPU]  # also in a build for CUDA, whose own guard needs a driver
    return True
