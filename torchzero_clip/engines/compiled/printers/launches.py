"""Launches: every kernel of ours in Triton starts here, where it is counted and looked at."""

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
"""Of all kernels; Triton 3.9 warns where it is not said whether a product and a sum may be one."""
BOUND = {} if torch.version.hip else {"maxnreg": 128}
"""The registers of a thread of list programs: a quarter of a card's threads, which are enough to
wait for memory. Else ptxas chooses fewer, and a stack. The compiler for AMD takes no bound."""
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
"""What vectors and scalars are given as."""


@dataclass
class TritonKernel:
    """A function in Triton, which is compiled when it is first launched on a device.

    Args:
        name: A name to count its launches by.
        text: The page that it stands on; that of kernel.py where it is none.
        signature: Its arguments and their types.
    """

    name: str
    text: str | None
    signature: dict[str, str]
    works: bool = False  # whether it has been launched
    starts: dict[Any, Callable[..., None]] = field(default_factory=dict)  # by device and constants

    @cached_property
    def function(self) -> Any:
        """What Triton makes of the text."""
        if self.text is None:
            from torchzero_clip.engines.compiled.printers import triton_include

            return getattr(triton_include, f"torchzero_clip_{self.name}")
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:24]  # of another text is another
        page = f"<torchzero_clip kernel {digest}>"
        lines = self.text.splitlines(keepends=True)
        linecache.cache[page] = (len(self.text), None, lines, page)  # Triton reads it there
        space: dict[str, Any] = {"__name__": page}
        exec(compile(self.text, page, "exec", dont_inherit=True), space)  # types are words
        return space["kernel"]


JOINED = TritonKernel(
    "joined",
    None,
    {"parts": "*fp64", "layout": "*i64", "count": "i32", "out": "*fp64", "most": "i32"},
)
LAUNCHES: Counter[str] = Counter()
"""How often kernels were launched in this process, by name."""
WATCHED: list[Callable[[str, Sequence[Any]], None]] = []
"""Called with the name and arguments of each launch: no dispatcher of torch sees it."""


class KernelError(RuntimeError):
    """Raised where Triton cannot compile a kernel."""


def launch(kernel: TritonKernel, programs: int, *arguments: Any, **constants: Any) -> None:
    """Start so many programs of a kernel; every launch of ours passes here, and is counted.

    The first of its arguments is a tensor. On tensors without values they are looked at, and
    nothing is computed.
    """
    LAUNCHES[kernel.name] += 1
    device, last = arguments[0].device, tuple(constants.values())
    with on(device):  # Triton takes the current device, wherever the tensors are
        for seen in WATCHED:
            seen(kernel.name, (programs, *arguments))
        if fake_mode(arguments[0]) is not None:
            return _check(kernel, arguments)
        if (start := kernel.starts.get((device, last))) is not None:
            return start(programs, *arguments, *last)
        try:
            bound = BOUND if kernel.name == "program" else {}
            grid = kernel.function[(programs,)]
            made = grid(*arguments, **constants, **OPTIONS, **bound)
        except Exception as error:
            if kernel.works or isinstance(error, torch.OutOfMemoryError):
                raise
            raise KernelError(_said(error)) from error
        if (start := launcher(made)) is not None:
            kernel.starts[device, last] = start
    kernel.works = True
    return None


def _said(error: BaseException) -> str:
    """The last line that an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _check(kernel: TritonKernel, arguments: Sequence[Any]) -> None:
    """Raise where an argument is not what the kernel takes."""
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise TypeError(
            f"{kernel.name} takes tensors of one device, got {sorted(map(str, devices))}"
        )
    for (name, kind), x in zip(kernel.signature.items(), arguments, strict=True):
        if isinstance(x, Tensor):
            fits = POINTERS.get(x.dtype) == kind and x.is_contiguous()
            given = f"{x.dtype} with strides {x.stride()}"
        else:
            fits = kind == "i32" and type(x) is int and 0 <= x < 2**31
            given = repr(x)
        if not fits:
            raise TypeError(f"{kernel.name} takes a contiguous {kind} as {name}, got {given}")
