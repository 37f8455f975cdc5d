"""Backends: what runs programs on which device, and what is said where that is missing."""

from __future__ import annotations

import sys

import torch

from torchzero_clip.engines.compiled.printers import cpp, triton
from torchzero_clip.engines.compiled.printers.build import compiler
from torchzero_clip.engines.compiled.printers.program import Program

WINDOWS = sys.platform == "win32"
NEEDS = {
    "cpu": "a C++ compiler: install g++ or clang, or name one in the environment variable CXX",
    "cuda": "Triton for parameters on cuda: pip install triton",
}
OTHERS = ("xpu", "mps")
"""The kinds of devices that no backend is for; programs run there node by node."""


def call_of(program: Program, name: str) -> cpp.Call | None:
    """What runs a program; None for node by node."""
    if on_gpu(program.device, name):
        return triton.native(program)
    return cpp.native(program) if name == "native" and program.device.type == "cpu" else None


def on_gpu(device: torch.device, name: str) -> bool:
    """Whether programs run in Triton."""
    kind = {"plain": "", "triton": "cuda"}.get(name, device.type)
    return kind == "cuda" and triton.here()


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
