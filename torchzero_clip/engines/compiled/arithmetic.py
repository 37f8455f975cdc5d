"""Arithmetic: the one table of what a vector program can do with a few numbers, by torch's names.

What it lacks stays a call of torch.
"""

from __future__ import annotations

import math
import re

import torch

ENTRIES = {
    "copy": "{0}",
    "fill": "{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "div": "divided({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "pow": "{power}({0}, {1})",
    "hypot": "longest({0}, {1})",
    "lerp": "mix({0}, {1}, {2})",
    "addcmul": "{0} + {1} * {2}",
    "addcdiv": "{0} + divided({1}, {2})",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "clamp": "smaller(larger({0}, {1}), {2})",
    "where": "chosen({0}, {1}, {2})",
    "masked_fill": "chosen({1}, {2}, {0})",
    "neg": "-{0}",
    "abs": "size({0})",
    "sign": "sign({0})",
    "sqrt": "root({0})",
    "square": "{0} * {0}",
    "reciprocal": "inverse({0})",
    "exp": "exp_of({0})",
    "cos": "cos_of({0})",
    "exp2": "exp2_of({0})",
    "log": "log_of({0})",
    "log2": "log2_of({0})",
    "floor": "floor_of({0})",
    "ceil": "ceil_of({0})",
    "trunc": "trunc_of({0})",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "{0} == 0",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_not": "{0} == 0",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}",
    "isinf": "is_infinite({0})",
}
"""An entry of what an operator makes, from those of its operands, in C++ and in Triton: vector.h
and kernel.py have functions of the same names."""
FLAGS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"}
FLAGS |= {"logical_not", "logical_and", "logical_or"}
"""Those whose result is true or false, whatever is compared."""
FLOATS = {"remainder", "pow", "hypot", "lerp", "neg", "abs", "sign", "sqrt", "reciprocal", "exp"}
FLOATS |= {"cos", "exp2", "log", "log2", "floor", "ceil", "trunc", "isinf", "div"}
"""Those that are here for floating point alone."""
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
SYNONYMS = {
    "clone": "copy",
    "_to_copy": "copy",
    "scalar_tensor": "fill",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
    "max": "amax",
    "min": "amin",
}
MADE = {"full_like": 1, "full": 1, "zeros_like": 0.0, "zeros": 0.0, "ones_like": 1.0, "ones": 1.0}
MADE |= {"new_zeros": 0.0, "new_ones": 1.0, "new_full": 2}
"""Operators that fill: the number, or which argument says it."""
FORM = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit"}
"""Arguments that say where a result lies, which its form tells."""
TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "whole",
    torch.int32: "int",
    torch.bool: "bool",
}
"""The dtypes of entries, in C++."""


def fields(template: str) -> set[int]:
    """The operands that a template names."""
    return set(map(int, re.findall(r"{(\d)}", template)))
