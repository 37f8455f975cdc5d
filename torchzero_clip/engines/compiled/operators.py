"""Operators: the one table of what programs do with an entry, in torch, C++ and Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensors import wide


class Operator(NamedTuple):
    """An operator of TensorList as an expression: {0} is the list itself, {1} the first operand."""

    torch: str
    native: str
    """The same in C++ and in Triton: kernel.h, vector.h and kernel.py have functions of the same
    names, and each language its own word for {lib} and {power}."""
    boolean: bool = False
    """Whether the result is true or false."""


OPERATORS: dict[str, Operator] = {
    "mul": Operator("{0} * {1}", "{0} * {1}"),
    "div": Operator("{0} / {1}", "divided({0}, {1})"),
    "add": Operator("{0} + {1}", "{0} + {1}"),
    "sub": Operator("{0} - {1}", "{0} - {1}"),
    "addcmul": Operator("{0} + {1} * {2}", "{0} + {1} * {2}"),
    "lerp": Operator("torch.lerp({0}, {1}.to({0}.dtype), {2}.to({0}.dtype))", "mix({0}, {1}, {2})"),
    "clamp_min": Operator("torch.maximum({0}, {1})", "larger({0}, {1})"),
    "clamp_max": Operator("torch.minimum({0}, {1})", "smaller({0}, {1})"),
    "where": Operator("torch.where({1}, {0}, {2})", "chosen({1}, {0}, {2})"),
    "hypot": Operator("torch.hypot({0}, {1})", "longest({0}, {1})"),
    "atan2": Operator("torch.atan2({0}, {1})", "angle({0}, {1})"),
    "neg": Operator("-{0}", "-{0}"),
    "abs": Operator("torch.abs({0})", "size({0})"),
    "sign": Operator("torch.sign({0})", "sign({0})"),
    "sqrt": Operator("torch.sqrt({0})", "root({0})"),
    "rsqrt": Operator("torch.rsqrt({0})", "inverse(root({0}))"),
    "pow": Operator("torch.pow({0}, {1})", "{power}({0}, {1})"),
    "reciprocal": Operator("torch.reciprocal({0})", "inverse({0})"),
    "positive": Operator("{0} > 0", "{0} > 0", boolean=True),
    "isfinite": Operator("torch.isfinite({0})", "{0} - {0} == 0", boolean=True),
    "isinf": Operator("torch.isinf({0})", "is_infinite({0})", boolean=True),
    "isnan": Operator("torch.isnan({0})", "{0} != {0}", boolean=True),
}
"""The names of nodes in a trace, besides "load" (of a buffer), "to" (another dtype), "over" (a
ratio of any size) and "round" (to bfloat16, up or down by the bits of a key and each element)."""

FUNCTIONS = {name: f"{{lib}}{name}({{0}})" for name in ("exp", "log", "sin", "cos", "erf")}
FUNCTIONS |= {name: f"{name}_of({{0}})" for name in ("expm1", "log1p", "tanh")}
FUNCTIONS |= {"sigmoid": "inverse(1 + {lib}exp(-{0}))"}
OPERATORS |= {name: Operator(f"torch.{name}({{0}})", text) for name, text in FUNCTIONS.items()}
IN_DOUBLE = {*FUNCTIONS, "exp2", "log2", "floor", "ceil"}
"""What Triton computes in float64: what it has in float32 is further from torch's."""

SYNONYMS = {"add_scaled": "addcmul"}
"""Operators of TensorList that are another one here: a factor that is now 1, now a tensor,
then shares a program."""


def over(x: Tensor, ratio: Tensor) -> Tensor:
    """x / ratio for a ratio of any size, as two products in float64: `over` of kernel.h."""
    dtype = wide(x.device)
    most, power = (1e290, 512) if dtype == torch.float64 else (1e30, 64)
    ratio = ratio.to(dtype)
    size = ratio.abs()
    half = torch.full_like(ratio, 2.0**-power).where(size > most, torch.ones_like(ratio))
    half = torch.full_like(ratio, 2.0**power).where(size < 1 / most, half)
    return (x.to(dtype) * (1 / (ratio * half)) * half).to(x.dtype)
