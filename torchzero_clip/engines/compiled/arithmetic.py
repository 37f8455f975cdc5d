"""Arithmetic: the one table of what a vector program can do with a few numbers, by torch's names.

What it lacks stays a call of torch.
"""

from __future__ import annotations

import math
import re

import torch

from torchzero_clip.engines.compiled.operators import OPERATORS

COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SIGNS = {**COMPARED, "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
ENTRIES = {name: row.native for name, row in OPERATORS.items() if name != "positive"}
ENTRIES |= {name: f"{{0}} {sign} {{1}}" for name, sign in SIGNS.items()}
ENTRIES |= {
    "copy": "{0}",
    "fill": "{0}",
    "rsub": "{1} - {0}",
    "remainder": "remainder({0}, {1})",
    "addcdiv": "{0} + divided({1}, {2})",
    "clamp": "smaller(larger({0}, {1}), {2})",
    "where": "chosen({0}, {1}, {2})",
    "masked_fill": "chosen({1}, {2}, {0})",
    "square": "{0} * {0}",
    "exp2": "{lib}exp2({0})",
    "log2": "{lib}log2({0})",
    "floor": "{lib}floor({0})",
    "ceil": "{lib}ceil({0})",
    "trunc": "trunc_of({0})",
    "bitwise_not": "{0} == 0",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "logical_not": "{0} == 0",
}
"""An entry of what an operator makes, from those of its operands, in C++ and in Triton: those of
lists, but for `positive`, which torch calls another, and more."""
FLAGS = {*COMPARED, "isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or"}
"""Those whose result is true or false, whatever is compared."""
EXACT = {"mul", "add", "sub", "addcmul", "clamp_min", "clamp_max", "where", "isnan"}
FLOATS = {"remainder", "exp2", "log2", "floor", "ceil", "trunc"} | (OPERATORS.keys() - EXACT)
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
    "maximum": "clamp_min",
    "minimum": "clamp_max",
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
