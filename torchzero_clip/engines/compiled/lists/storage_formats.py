"""Storage formats: record the rounding of low-precision parameters and state on a tape."""

from __future__ import annotations

from typing import Any

import torch

from torchzero_clip.core.formats import Kahan, Nearest, Stochastic
from torchzero_clip.core.norms import NAMED
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.engines.compiled.lists.memory import PARAMETERS
from torchzero_clip.engines.compiled.lists.tape import BucketTape, Taped


def rounded(tape: BucketTape, value: int, form: Stochastic, dtype: torch.dtype) -> int:
    """Record the stochastic rounding of a float32 value, and return the rounded value."""
    tape.elements = form.elements
    vectors = tape.whole(form.keys), tape.whole(form.elements.starts)
    operands = (("value", value), *vectors, ("half", form.half))
    return tape.node("round", operands, dtype)


def move(tape: BucketTape, form: Nearest, w: TensorList, u: TensorList) -> None:
    """Record w ← w - u for parameters w in a low-precision storage format."""
    dtype = tape.buffers[PARAMETERS].dtype
    wide = w.to(torch.float32)
    current = tape.current
    if isinstance(form, Kahan):
        change: Any = Taped(tape, buffer=tape.beside).to(torch.float32).sub(u)
        new: Any = wide.add(change).to(dtype)
        lost: Any = change.add(wide.sub(new))
        compensation: Any = lost.where(lost.isfinite(), 0.0).to(torch.bfloat16)
        current[tape.beside] = compensation.value
        current[PARAMETERS] = new.value
        return
    difference: Any = wide.sub(u)
    x = difference.value
    if form.wide:
        current[PARAMETERS] = tape.node("upper", (("value", x),), dtype)
        current[tape.beside] = tape.node("lower", (("value", x),), torch.int16)
    elif isinstance(form, Stochastic):
        current[PARAMETERS] = rounded(tape, x, form, dtype)
    else:
        current[PARAMETERS] = tape.cast(x, dtype)
        before = tape.cast(tape.loads[PARAMETERS], torch.float32)
        values = x, before, current[PARAMETERS]
        operands = tuple([("value", value) for value in values])
        sums = tape.run((NAMED["sum"], tape.node("stayed", operands, torch.float32)))
        assert sums is not None
        form.count(sums[0], tape.sizes)
