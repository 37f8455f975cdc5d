"""Native forms: where many tensors lie and how, in one native call, by DLPack's interface in C.

Torch says of each the address, dtype, device, shape and strides. Where torch or a compiler lacks
it, buffers ask one tensor after the other.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from torchzero_clip.core.tensor_kinds import all_real
from torchzero_clip.core.torch_private import exchange_table
from torchzero_clip.engines.compiled.printers.build import function

SOURCE = '#include "native_forms.h"'
FLAGS = "-std=c++17 -O1 -fPIC -shared"
DESCRIBE = 5  # the pointer among those of DLPack's table, of which the first is its version


class NativeForms:
    """The forms of some tensors, which are compared with those that they have later, or others.

    Attributes:
        addresses: Those of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._words = array("q", [0] * sum([3 + 2 * t.dim() for t in tensors]))
        self._tensors = array("Q", map(id, tensors))
        self.addresses = self._look(self._tensors, compare=False)

    def hold(self) -> bool:
        """Whether the tensors, which must be there still, lie as they did."""
        return self.addresses is not None and self._look(self._tensors) == self.addresses

    def of(self, tensors: Sequence[Tensor]) -> array[int] | None:
        """The addresses of as many others that have the same forms; None where they do not."""
        return None if self.addresses is None else self._look(array("Q", map(id, tensors)))

    def _look(self, tensors: array[int], compare: bool = True) -> array[int] | None:
        look, starts = looks(), array("Q", bytes(8 * len(tensors)))
        if look is None:
            return None
        rows = [row.buffer_info()[0] for row in (tensors, starts, self._words)]
        try:
            same = look(rows[0], len(tensors), *rows[1:], compare)
        except Exception:  # DLPack has no word for some
            same = 0
        return starts if same == 1 else None


@cache
def looks() -> Any:
    """The native call; None where there is none."""
    capsule, kernel = exchange_table(), function(SOURCE, FLAGS)
    if capsule is None or kernel is None:
        return None
    of = ctypes.pythonapi.PyCapsule_GetPointer
    of.restype, of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    words = ctypes.POINTER(ctypes.c_void_p)
    interface = ctypes.cast(of(capsule, b"dlpack_exchange_api"), words)
    if (interface[0] or 0) & 0xFFFFFFFF != 1 or not interface[DESCRIBE]:  # its major version
        return None
    kinds = [ctypes.c_void_p, ctypes.c_longlong, *[ctypes.c_void_p] * 2, ctypes.c_longlong]
    made = ctypes.PYFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p, *kinds)
    call = made(ctypes.cast(kernel, ctypes.c_void_p).value or 0)
    return lambda *given: call(interface[DESCRIBE], *given)


def forms_of(tensors: Sequence[Tensor]) -> NativeForms | None:
    """The forms of tensors; None where they are not seen natively."""
    made = NativeForms(tensors) if all_real(tensors) else None
    return made if made is not None and made.addresses is not None else None
