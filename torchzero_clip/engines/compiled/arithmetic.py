"""Arithmetic: the one table of what a vector program can do with a few numbers, by torch's names.

What it lacks stays a call of torch.
"""

from __future__ import annotations

import re

import torch

ENTRIES = {
    "copy": "{0}",
    "fill": "{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "remainder": "remainder({0}, {1})",
    "pow": "{power}({0}, {1})",
    "hypot": "__builtin_hypot({0}, {1})",
    "lerp": "mix({0}, {1}, {2})",
    "addcmul": "{0} + {1} * {2}",
    "addcdiv": "{0} + {1} / {2}",
    "maximum": "larger({0}, {1})",
    "minimum": "smaller({0}, {1})",
    "clamp": "smaller(larger({0}, {1}), {2})",
    "where": "{0} ? {1} : {2}",
    "masked_fill": "{1} ? {2} : {0}",
    "neg": "-{0}",
    "abs": "size({0})",
    "sign": "({0} > 0) - ({0} < 0)",
    "sqrt": "__builtin_sqrt({0})",
    "square": "{0} * {0}",
    "reciprocal": "1 / {0}",
    "exp": "__builtin_exp({0})",
    "exp2": "__builtin_exp2({0})",
    "log": "__builtin_log({0})",
    "log2": "__builtin_log2({0})",
    "floor": "__builtin_floor({0})",
    "ceil": "__builtin_ceil({0})",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
    "bitwise_not": "!{0}",
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
    "isinf": "size({0}) == __builtin_inf()",
}
"""An entry of what an operator makes, from those of its operands, in C++."""
FLAGS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf"}
FLAGS |= {"logical_not", "logical_and", "logical_or"}
"""Those whose result is true or false, whatever is compared."""
FLOATS = {"remainder", "pow", "hypot", "lerp", "neg", "abs", "sign", "sqrt", "reciprocal", "exp"}
FLOATS |= {"exp2", "log", "log2", "floor", "ceil", "isinf", "div"}
"""Those that are here for floating point alone."""
REDUCTIONS = {
    "sum": ("0", "{0} + {1}", "{0}"),
    "mean": ("0", "{0} + {1}", "{0} / {n}"),
    "amax": ("-__builtin_inf()", "larger({0}, {1})", "{0}"),
    "amin": ("__builtin_inf()", "smaller({0}, {1})", "{0}"),
    "any": ("0", "({0} != 0) | ({1} != 0)", "{0}"),
    "all": ("1", "({0} != 0) & ({1} != 0)", "{0}"),
    "norm1": ("0", "{0} + size({1})", "{0}"),
    "norm2": ("0", "{0} + {1} * {1}", "__builtin_sqrt({0})"),
    "norminf": ("0", "larger({0}, size({1}))", "{0}"),
}
"""For each reduction where it begins, how another entry joins it, and what is left in the end; it
is done in float64, and of whole numbers in int64."""
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
