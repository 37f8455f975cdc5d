"""Every published name and ten chains, as rows of torch's own table of optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from torchzero_clip import Transform

from .chains import MATRICES, NAMES, VECTORS_TOO, published
from .presets import RULES, preset
from .torch_inputs import errors, inputs_of

TORCHS = {info.optim_cls.__name__.lower(): info for info in optim_db}


def table() -> list[OptimizerInfo]:
    return [*map(of_name, NAMES), *map(of_preset, RULES)]


def of_name(method: str) -> OptimizerInfo:
    """A published method, with the inputs that torch has for its optimizer of the same name."""
    if method in MATRICES:
        return row(published(method), partial(inputs_of, method), supports_complex=False)
    complex_too = method not in VECTORS_TOO and takes_complex(NAMES[method]())
    if method not in TORCHS:
        return row(published(method), partial(inputs_of, method), supports_complex=complex_too)
    torchs = TORCHS[method]
    return row(
        published(method, torchs.optim_cls.__name__),  # tests know some by their name
        torchs.optim_inputs_func,
        supports_complex=complex_too,
        decorators=[x for x in torchs.decorators if any(map(is_tolerance, x.decorators))],
    )


def of_preset(name: str) -> OptimizerInfo:
    inputs = TORCHS["adam"].optim_inputs_func
    return row(preset(name), inputs, adam=True, supports_complex=takes_complex(RULES[name]()))


def row(cls: type, inputs: Any, *, adam: bool = False, **more: Any) -> OptimizerInfo:
    return OptimizerInfo(
        cls,
        optim_inputs_func=inputs,
        optim_error_inputs_func=partial(errors, adam=adam),
        supported_impls=("fused",),
        not_og_supported_flags=(),
        supports_fused_on=("cpu",),
        **more,
    )


def takes_complex(rule: Transform) -> bool:
    return all(tfm.complex != "refuse" for tfm in rule.walk())


def is_tolerance(decorator: Any) -> bool:
    return type(decorator).__name__ == "toleranceOverride"
