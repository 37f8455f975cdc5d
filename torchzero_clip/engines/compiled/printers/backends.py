"""Backends: the choice of C++, Triton or PyTorch for a device, and messages about compilers."""

from __future__ import annotations

import os
import sys

import torch

from torchzero_clip.engines.compiled.printers import cpp, triton
from torchzero_clip.engines.compiled.printers.build import compiler
from torchzero_clip.engines.compiled.printers.program import Launch
from torchzero_clip.engines.compiled.printers.proof import WRONG, proven

WINDOWS = sys.platform == "win32"
NEEDS = {
    "cpu": "a C++ compiler: install g++ or clang, or set the environment variable CXX to the "
    "command of a compiler",
    "cuda": "Triton for parameters on cuda: pip install triton",
}
"""For each type of device with kernels: what kernels need, as the text of an error message."""
OTHERS = ("xpu", "mps")
"""The types of devices without kernels. PyTorch runs programs on them node by node."""


def call_of(launch: Launch, name: str) -> cpp.Call | None:
    """Return a function that runs the kernel of a program.

    Return None if there is no kernel for the device, or if the kernel failed the comparison with
    PyTorch. In that case, PyTorch runs the program node by node. `name` is a value of
    `Runner.backend`.
    """
    program = launch.program
    if on_gpu(program.device, name):
        return proven(launch, triton.native(program), triton.source)
    if on_cpu(program.device, name):
        return proven(launch, cpp.native(program), cpp.source)
    return None


def on_gpu(device: torch.device, name: str) -> bool:
    """Return whether programs run in Triton on this device."""
    if name == "plain" or device.type in WRONG:
        return False
    return triton.here() and (name == "triton" or device.type == "cuda")


def on_cpu(device: torch.device, name: str) -> bool:
    """Return whether programs run in C++ on this device."""
    return name == "native" and device.type == "cpu" and "cpu" not in WRONG


def missing(kind: str) -> str | None:
    """Return an error message if the engine cannot work on a type of device, else None."""
    if kind not in (*NEEDS, *OTHERS):
        return f"supports parameters on cpu, cuda, xpu and mps, got a parameter on {kind}"
    if kind in OTHERS or WINDOWS or _compiles(kind):
        return None
    command = os.environ.get("CXX", "") if kind == "cpu" else ""
    found = f". CXX is {command!r} now, which is not an installed command" if command else ""
    return f"needs {NEEDS[kind]}{found}"


def node_by_node(kind: str) -> str | None:
    """Return a message if programs run operator by operator on a type of device, else None."""
    if kind in NEEDS and _compiles(kind):
        return None
    return (
        f"cannot compile kernels for parameters on {kind} here, so steps are not faster than with "
        "compile=False"
    )


def _compiles(kind: str) -> bool:
    """Return whether the compiler for a type of device is installed."""
    return compiler() is not None if kind == "cpu" else triton.here()
