"""Backends: what runs programs on which device, and what is said where that is missing."""

from __future__ import annotations

import sys

import torch

from torchzero_clip.engines.compiled.printers import cpp, triton
from torchzero_clip.engines.compiled.printers.build import compiler
from torchzero_clip.engines.compiled.printers.program import Launch
from torchzero_clip.engines.compiled.printers.proof import WRONG, proven

WINDOWS = sys.platform == "win32"
NEEDS = {
    "cpu": "a C++ compiler: install g++ or clang, or name one in the environment variable CXX",
    "cuda": "Triton for parameters on cuda: pip install triton",
}
OTHERS = ("xpu", "mps")
"""The kinds of devices that no backend is for; programs run there node by node."""


def call_of(launch: Launch, name: str) -> cpp.Call | None:
    """What runs a program, once it is proven; None for node by node."""
    program, device = launch.program, launch.program.device
    if on_gpu(device, name):
        return proven(launch, triton.native(program), triton.source)
    return proven(launch, cpp.native(program), cpp.source) if on_cpu(device, name) else None


def on_gpu(device: torch.device, name: str) -> bool:
    """Whether programs run in Triton."""
    kind = {"plain": "", "triton": "cuda"}.get(name, device.type)
    return kind == "cuda" and triton.here() and device.type not in WRONG


def on_cpu(device: torch.device, name: str) -> bool:
    """Whether programs run in C++."""
    return name == "native" and device.type == "cpu" and "cpu" not in WRONG


def missing(kind: str) -> str | None:
    """The sentence about what is missing for a kind of device, or None."""
    if kind not in (*NEEDS, *OTHERS):
        return f"works for parameters on cpu, cuda, xpu and mps, got some on {kind}"
    return None if kind in OTHERS or WINDOWS or _there(kind) else f"needs {NEEDS[kind]}"


def node_by_node(kind: str) -> str | None:
    """The sentence where programs run operator by operator on a kind of device, or None."""
    if kind in NEEDS and _there(kind):
        return None
    return (
        f"has no kernels for parameters on {kind} here: what is recorded runs operator by "
        "operator, and leaving compile out is as fast"
    )


def _there(kind: str) -> bool:
    return compiler() is not None if kind == "cpu" else triton.here()
