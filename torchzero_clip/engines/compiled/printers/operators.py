"""Operators: the one table of what programs do with an entry, in torch, C++ and Triton.

It says what lists do, and what stands between them: there an operator has torch's name, and what
the table lacks stays a call of torch.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import wide


class Operator(NamedTuple):
    """An operator as an expression: {0} is the list itself, or torch's first operand.

    Attributes:
        native: The same in C++ and in Triton: operators.h and kernel.py have functions of the same
            names, and each language its own word for {lib} and {power}. An operand is taken in the
            dtype that is computed in, {1:own} as it is, and {1:ratio} as what `over` divides by.
        torch: For TensorList, in torch; empty where lists have no such operator.
        flag: Whether the result is true or false.
        whole: Whether whole numbers and flags are taken too.
        double: Whether Triton computes it in float64: what it has in float32 is further from
            torch's.
        aten: Whether torch's operator of the same name is this one.
    """

    native: str
    torch: str = ""
    flag: bool = False
    whole: bool = False
    double: bool = False
    aten: bool = True

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len(set(re.findall(r"{\d", self.native)))


OPERATORS: dict[str, Operator] = {
    "mul": Operator("{0} * {1}", "{0} * {1}", whole=True),
    "div": Operator("divided({0}, {1})", "{0} / {1}"),
    "add": Operator("{0} + {1}", "{0} + {1}", whole=True),
    "sub": Operator("{0} - {1}", "{0} - {1}", whole=True),
    "addcmul": Operator("{0} + {1} * {2}", "{0} + {1} * {2}", whole=True),
    "addcdiv": Operator("{0} + divided({1}, {2})", whole=True),
    "lerp": Operator("mix({0}, {1}, {2})", "torch.lerp({0}, {1}.to({0}.dtype), {2}.to({0}.dtype))"),
    "clamp_min": Operator("larger({0}, {1})", "torch.maximum({0}, {1})", whole=True),
    "clamp_max": Operator("smaller({0}, {1})", "torch.minimum({0}, {1})", whole=True),
    "clamp": Operator("smaller(larger({0}, {1}), {2})", whole=True),
    "where": Operator("chosen({1:own}, {0}, {2})", "torch.where({1}, {0}, {2})", whole=True),
    "hypot": Operator("longest({0}, {1})", "torch.hypot({0}, {1})"),
    "atan2": Operator("angle({0}, {1})", "torch.atan2({0}, {1})"),
    "remainder": Operator("remainder_of({0}, {1})"),
    "neg": Operator("-{0}", "-{0}"),
    "abs": Operator("size({0})", "torch.abs({0})"),
    "sign": Operator("sign({0})", "torch.sign({0})"),
    "square": Operator("{0} * {0}", whole=True),
    "sqrt": Operator("root({0})", "torch.sqrt({0})"),
    "rsqrt": Operator("inverse(root({0}))", "torch.rsqrt({0})"),
    "pow": Operator("{power}({0}, {1})", "torch.pow({0}, {1})"),
    "reciprocal": Operator("inverse({0})", "torch.reciprocal({0})"),
    "sigmoid": Operator("inverse(1 + {lib}exp(-{0}))", "torch.sigmoid({0})", double=True),
    "trunc": Operator("trunc_of({0})"),
    "positive": Operator("{0} > 0", "{0} > 0", flag=True, aten=False),
    "isfinite": Operator("{0} - {0} == 0", "torch.isfinite({0})", flag=True),
    "isinf": Operator("is_infinite({0})", "torch.isinf({0})", flag=True),
    "isnan": Operator("{0} != {0}", "torch.isnan({0})", flag=True, whole=True),
    "logical_and": Operator("({0} != 0) & ({1} != 0)", flag=True, whole=True),
    "logical_or": Operator("({0} != 0) | ({1} != 0)", flag=True, whole=True),
    "logical_not": Operator("{0} == 0", flag=True, whole=True),
    "bitwise_not": Operator("{0} == 0", whole=True),
    "copy": Operator("{0}", whole=True),
    "fill": Operator("{0}", whole=True),
    "over": Operator("over({0}, {1:ratio})", "over({0}, {1})"),
    "round": Operator(
        "rounded({0}, {1:own}, {2:own}, place, {3:own})",
        "rounded({0}.float(), {1}, {2}, {3})",
        aten=False,
    ),
    "wide_of": Operator("wide_of({0}, {1})", "wide_of({0}.bfloat16(), {1})", aten=False),
    "upper": Operator("upper({0})", "upper({0})", aten=False),
    "lower": Operator("lower({0})", "lower({0})", aten=False),
    "stayed": Operator(
        "chosen({0} == {1}, 0, chosen({2} == {1}, 67108864, 1))",
        "torch.where({0} == {1}, 0.0, torch.where({2} == {1}, 67108864.0, 1.0))",
        aten=False,
    ),
}
"""The names of nodes, besides those on a tape that are "load" (of a buffer) and "to" (another
dtype). `over` divides by a ratio of any size; what follows it is of the formats in core/formats:
`round` goes up or down by the bits of a key and each element, and `stayed` is what a meter counts
of a number in float32, that before, and the rounded one."""
FUNCTIONS = {name: f"{{lib}}{name}({{0}})" for name in ("exp", "log", "sin", "cos", "erf")}
FUNCTIONS |= {name: f"{name}_of({{0}})" for name in ("expm1", "log1p", "tanh")}
OPERATORS |= {x: Operator(text, f"torch.{x}({{0}})", double=True) for x, text in FUNCTIONS.items()}
for name in ("exp2", "log2", "floor", "ceil"):
    OPERATORS[name] = Operator(f"{{lib}}{name}({{0}})", double=True)
SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
for name, sign in (SIGNS | BITS).items():
    OPERATORS[name] = Operator(f"{{0}} {sign} {{1}}", flag=name in SIGNS, whole=True)

SYNONYMS = {"add_scaled": "addcmul"}
"""Operators of TensorList that are another one here: a factor that is now 1, now a tensor,
then shares a program."""
ATEN: dict[str, tuple[str, tuple[int | float, ...]]] = {
    "maximum": ("clamp_min", ()),
    "minimum": ("clamp_max", ()),
    "max": ("amax", ()),
    "min": ("amin", ()),
    "rsub": ("sub", (1, 0)),
    "where": ("where", (1, 0, 2)),
    "masked_fill": ("where", (2, 1, 0)),
    **dict.fromkeys(("copy", "clone", "_to_copy"), ("copy", (-1,))),
    **dict.fromkeys(("fill", "scalar_tensor"), ("fill", (-1,))),
    **dict.fromkeys(("full", "full_like"), ("fill", (1,))),
    "new_full": ("fill", (2,)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), ("fill", (0.0,))),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), ("fill", (1.0,))),
}
"""Operators of torch that are another one here, and its operands: which argument of torch's it is,
as a whole number, or a number itself. None are all in torch's order."""
REDUCTIONS = {
    "sum": (0, "{0} + {1}", "plus", "{0}"),
    "mean": (0, "{0} + {1}", "plus", "{0} / {n}"),
    "amax": (-math.inf, "larger({0}, {1})", "larger", "{0}"),
    "amin": (math.inf, "smaller({0}, {1})", "smaller", "{0}"),
    "any": (0, "({0} != 0) | ({1} != 0)", "larger", "{0}"),
    "all": (1, "({0} != 0) & ({1} != 0)", "smaller", "{0}"),
    "norm1": (0, "{0} + size({1})", "plus", "{0}"),
    "norm2": (0, "{0} + {1} * {1}", "plus", "root({0})"),
    "norminf": (0, "larger({0}, size({1}))", "larger", "{0}"),
}
"""For each reduction where it begins, how another entry joins it, what joins two of them, and what
is left in the end; it is done in float64, and of whole numbers in int64."""


def over(x: Tensor, ratio: Tensor) -> Tensor:
    """x / ratio for a ratio of any size, as two products in float64: `over` of kernel.h."""
    dtype = wide(x.device)
    most, power = (1e290, 512) if dtype == torch.float64 else (1e30, 64)
    ratio = ratio.to(dtype)
    size = ratio.abs()
    half = torch.full_like(ratio, 2.0**-power).where(size > most, torch.ones_like(ratio))
    half = torch.full_like(ratio, 2.0**power).where(size < 1 / most, half)
    return (x.to(dtype) * (1 / (ratio * half)) * half).to(x.dtype)
