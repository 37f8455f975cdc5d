"""Calls: what a tape makes of a call of one of torch's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FACTS = """data_ptr dim element_size is_complex is_conj is_contiguous is_floating_point is_neg
nelement numel promote_types result_type size storage_offset stride untyped_storage
__hash__ __len__"""
"""Functions that tell of a tensor what does not change while its form and its home do not."""
UNKNOWN = """argwhere masked_select nonzero unique unique_consecutive bernoulli bernoulli_ cauchy_
exponential_ geometric_ log_normal_ multinomial normal normal_ poisson random_ uniform_ rand
rand_like randint randint_like randn randn_like randperm"""
"""Functions whose result is of a form that hangs on values, or is another each time."""
HOMES = ("_base", "grad")
"""Attributes that are tensors which were there before."""
COPIES = ("clone", "contiguous", "detach", "reshape", "to", "view")
QUICKER = {Tensor.__rsub__: torch.rsub}
"""Functions of torch that do the same with less Python around it."""


def tells_a_fact(func: Any, out: Any) -> bool:
    """Whether what a call returned stays the same while tensors have their form and home."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ in HOMES or not isinstance(out, Tensor)
    return name in FACTS.split()


def why_not(name: str, args: Sequence[Any], out: Any) -> str | None:
    """The reason why a call cannot be repeated, if there is one."""
    made = out if isinstance(out, (tuple, list)) else () if out is None else (out,)
    indexes = args[1:2] if name in ("__getitem__", "__setitem__") else ()
    if name in UNKNOWN.split() or any([isinstance(x, Tensor) for x in indexes]):
        return f"{name} is another each time"
    if not all([isinstance(x, Tensor) for x in made]):
        return f"{name} looks at what a tensor holds"
    if name.startswith("_fused") or name == "__set__":
        return f"{name} writes to several arguments"
    if name.startswith("__i") and name != "__invert__":
        return f"{name} may or may not write in place"
    return None


def copies(name: str, source: Any, out: Any) -> bool:
    """Whether a call made the same values in the same form."""
    return name in COPIES and _form(source) == _form(out)


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), x.device
