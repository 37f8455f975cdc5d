"""Launches: the function that starts and counts all Triton kernels of this library."""

from __future__ import annotations

import hashlib
import linecache
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.torch_private import fake_mode, launcher
from torchzero_clip.engines.compiled.printers.pointer_tables import on

OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
"""The compiler options of all kernels. Triton 3.9 warns unless `enable_fp_fusion` is given."""
REGISTERS = {} if torch.version.hip else {"maxnreg": 128}
"""The limit of registers per thread for kernels of list programs. With this limit, a quarter of a
GPU's threads run at the same time. That is enough to hide the latency of memory. Without the limit,
ptxas chooses fewer registers and spills. The compiler for AMD does not accept a limit."""
POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*u1",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""For each dtype, Triton's type of a pointer to a tensor."""


@dataclass
class TritonKernel:
    """A Triton function that is compiled at its first launch on a device.

    Args:
        name: A name under which launches are counted.
        text: The source text of the kernel, or None for a function of triton_include.py.
        signature: The type of each parameter.
    """

    name: str
    text: str | None
    signature: dict[str, str]
    works: bool = False  # whether a launch has succeeded
    starts: dict[Any, Callable[..., None]] = field(default_factory=dict)  # by device and constants

    @cached_property
    def function(self) -> Any:
        """The function that Triton creates from the text."""
        if self.text is None:
            from torchzero_clip.engines.compiled.printers import triton_include

            return getattr(triton_include, f"torchzero_clip_{self.name}")
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:24]
        file = f"<torchzero_clip kernel {digest}>"  # each text has a file name of its own
        lines = self.text.splitlines(keepends=True)
        linecache.cache[file] = (len(self.text), None, lines, file)  # Triton reads the source there
        space: dict[str, Any] = {"__name__": file}
        # dont_inherit: the types in the signature must not become strings
        exec(compile(self.text, file, "exec", dont_inherit=True), space)
        return space["kernel"]


JOINED = TritonKernel(
    "joined",
    None,
    {"parts": "*fp64", "layout": "*i64", "count": "i32", "out": "*fp64", "most": "i32"},
)
LAUNCHES: Counter[str] = Counter()
"""The number of launches of each kernel in this process, by the kernel's name."""
WATCHED: list[Callable[[str, Sequence[Any]], None]] = []
"""`launch` calls each of these functions with the name and arguments of each kernel. Audits need
these calls, because PyTorch's dispatcher does not see Triton kernels."""


class KernelError(RuntimeError):
    """Raised if Triton cannot compile a kernel."""


def launch(kernel: TritonKernel, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start a kernel with a number of Triton programs, and count the launch.

    The first of `arguments` is a tensor. If this tensor is fake, `launch` checks the arguments and
    computes nothing.
    """
    LAUNCHES[kernel.name] += 1
    device = arguments[0].device
    last = tuple(constants.values())
    with on(device):  # Triton starts kernels on the current device, wherever the tensors are
        for watch in WATCHED:
            watch(kernel.name, (programs, *arguments))
        if fake_mode(arguments[0]) is not None:
            return _check(kernel, arguments)
        if (start := kernel.starts.get((device, last))) is not None:
            return start(programs, *arguments, *last)
        try:
            limit = REGISTERS if kernel.name == "program" else {}
            grid = kernel.function[(programs,)]
            compiled = grid(*arguments, **constants, **OPTIONS, **limit)
        except Exception as error:
            if kernel.works or isinstance(error, torch.OutOfMemoryError):
                raise
            raise KernelError(_last_line(error)) from error
        if (start := launcher(compiled)) is not None:
            kernel.starts[device, last] = start
    kernel.works = True
    return None


def _last_line(error: BaseException) -> str:
    """Return the type of an error and the last line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _check(kernel: TritonKernel, arguments: Sequence[Any]) -> None:
    """Raise an error if an argument does not match the kernel's signature."""
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise TypeError(
            f"{kernel.name}: all tensors must be on one device, got {sorted(map(str, devices))}"
        )
    for (name, kind), x in zip(kernel.signature.items(), arguments, strict=True):
        if isinstance(x, Tensor):
            fits = POINTERS.get(x.dtype) == kind and x.is_contiguous()
            got = f"{x.dtype} with strides {x.stride()}"
        else:
            fits = kind == "i32" and type(x) is int and 0 <= x < 2**31
            got = repr(x)
        if not fits:
            raise TypeError(f"{kernel.name}: {name} must be a contiguous {kind}, got {got}")
