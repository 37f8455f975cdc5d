"""Native forms: compare the addresses and forms of many tensors in one native call.

The form of a tensor is its dtype, device, shape and strides. Before each replay, `Conditions`
compares all parameters, gradients and state with the recorded tensors. `NativeForms` makes this
comparison in C++. The C++ code uses DLPack's exchange interface, which returns the address and form
of a tensor without calling Python. If PyTorch lacks this interface or there is no C++ compiler,
`forms_of` returns None. Then `Conditions` compares the tensors in Python.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache

from torch import Tensor

from torchzero_clip.core.tensor_kinds import all_real
from torchzero_clip.core.torch_private import exchange_table
from torchzero_clip.engines.compiled.printers.build import function

SOURCE = '#include "native_forms.h"'
FLAGS = "-std=c++17 -O1 -fPIC -shared"
DESCRIBE = 5  # the index of DLPack's function that describes a tensor; index 0 is the version


class NativeForms:
    """The recorded addresses and forms of tensors, for comparisons in later steps.

    Attributes:
        addresses: The address of each tensor, or None if DLPack cannot describe one of the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._words = array("q", [0] * sum([3 + 2 * t.dim() for t in tensors]))
        self._tensors = array("Q", map(id, tensors))
        self.addresses = self._describe(self._tensors, compare=False)

    def unchanged(self) -> bool:
        """Return whether addresses and forms are unchanged. The tensors must still be alive."""
        return self.addresses is not None and self._describe(self._tensors) == self.addresses

    def addresses_of(self, tensors: Sequence[Tensor]) -> array[int] | None:
        """Return the addresses of other tensors if their forms are the same, otherwise None."""
        return None if self.addresses is None else self._describe(array("Q", map(id, tensors)))

    def _describe(self, tensors: array[int], compare: bool = True) -> array[int] | None:
        """Return the addresses of tensors, and compare or store the forms of the tensors.

        If `compare` is True, the forms are compared with `_words`. If False, the forms are written
        to `_words`. Returns None if a form differs or if DLPack cannot describe a tensor.
        """
        describe = native_function()
        starts = array("Q", bytes(8 * len(tensors)))
        if describe is None:
            return None
        pointers = [table.buffer_info()[0] for table in (tensors, starts, self._words)]
        try:
            same = describe(pointers[0], len(tensors), *pointers[1:], compare)
        except Exception:  # DLPack does not know some dtypes and layouts
            same = 0
        return starts if same == 1 else None


@cache
def native_function() -> Callable[..., int] | None:
    """Return the C++ function of native_forms.h with its first argument filled in.

    Returns None if there is no C++ compiler or if PyTorch lacks DLPack's exchange interface.
    """
    capsule = exchange_table()
    kernel = function(SOURCE, FLAGS)
    if capsule is None or kernel is None:
        return None
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype = ctypes.c_void_p
    pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]
    words = ctypes.POINTER(ctypes.c_void_p)
    interface = ctypes.cast(pointer_of(capsule, b"dlpack_exchange_api"), words)
    major_version = (interface[0] or 0) & 0xFFFFFFFF
    if major_version != 1 or not interface[DESCRIBE]:
        return None
    kinds = [ctypes.c_void_p, ctypes.c_longlong, *[ctypes.c_void_p] * 2, ctypes.c_longlong]
    prototype = ctypes.PYFUNCTYPE(ctypes.c_longlong, ctypes.c_void_p, *kinds)
    call = prototype(ctypes.cast(kernel, ctypes.c_void_p).value or 0)
    return lambda *arguments: call(interface[DESCRIBE], *arguments)


def forms_of(tensors: Sequence[Tensor]) -> NativeForms | None:
    """Return the native forms of tensors, or None if native code cannot compare the tensors."""
    if not all_real(tensors):
        return None
    forms = NativeForms(tensors)
    return None if forms.addresses is None else forms
