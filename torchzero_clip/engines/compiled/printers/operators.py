"""Operators: a table of all operators, each as an expression in PyTorch, C++ and Triton.

Both kinds of programs use the table:

- List programs have the operators that have a text for PyTorch (`Operator.torch`).
- Vector programs have the operators whose name is also the name of a PyTorch operator. PyTorch runs
  the operators that the table lacks.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.tensor_kinds import wide


class Operator(NamedTuple):
    """An operator as an expression. {0} is the list, or the first operand of PyTorch's operator.

    Attributes:
        native: The expression in C++ and in Triton. The functions in this expression have the same
            names in operators.h and in triton_include.py. {lib} and {power} stand for
            `Language.lib` and `Language.power`. Operands are cast to the dtype of the computation.
            {1:own} keeps the operand's own dtype. {1:ratio} is the prepared divisor of `over`.
        torch: The expression in PyTorch for list programs. Empty if they lack the operator.
        flag: Whether the result is true or false.
        whole: Whether operands may also be integers or flags.
        double: Whether Triton computes the operator in float64, because Triton's float32 function
            is less accurate than PyTorch's.
        aten: Whether PyTorch's operator of the same name gives the same result.
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
"""The operators by name. A tape has two more operators: "load" (of a buffer) and "to" (a cast).

`over` divides by a ratio of any size. The entries after `over` are for the storage formats in
core/formats. `round` rounds each element up or down at random. The random bits depend on a key and
on the place of the element. `stayed` counts updates that were lost to rounding. The operands of
`stayed` are the exact value in float32, the value before the step, and the rounded value."""
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
"""Operators of TensorList that a tape records as another operator. Then a step whose factor is 1
uses the same program as a step whose factor is a tensor."""
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
"""PyTorch operators that have another name here, with the order of their operands. In the order, an
integer is the position of an argument of PyTorch's operator, and a float is the operand itself. If
the order is empty, the operands have PyTorch's order."""
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
"""For each reduction: the start value, the text that adds an element, the function that joins two
partial results, and the text of the final result. Reductions are computed in float64, or in int64
for integers."""


def over(x: Tensor, ratio: Tensor) -> Tensor:
    """Divide x by a ratio of any size. The division is done as two products in float64.

    The functions `over` in kernel.h and in triton_include.py compute the same.
    """
    dtype = wide(x.device)
    limit = 1e290 if dtype == torch.float64 else 1e30
    power = 512 if dtype == torch.float64 else 64
    ratio = ratio.to(dtype)
    size = ratio.abs()
    half = torch.full_like(ratio, 2.0**-power).where(size > limit, torch.ones_like(ratio))
    half = torch.full_like(ratio, 2.0**power).where(size < 1 / limit, half)
    return (x.to(dtype) * (1 / (ratio * half)) * half).to(x.dtype)
