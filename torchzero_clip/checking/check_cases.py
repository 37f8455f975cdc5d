"""The chains that `check_device` runs, with the shapes of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torchzero_clip.core import Chain, Transform
from torchzero_clip.modules.adaptive import AGC, AdaGC, AutoClip, ZClip
from torchzero_clip.modules.averages import WeightEMA
from torchzero_clip.modules.clipping import ClipNorm, ClipNormByEMA, ClipNormGrowth, ClipValue
from torchzero_clip.modules.descent import LR, Adam, AdamAtan2, Momentum, WeightDecay
from torchzero_clip.modules.flow import Guard, SkipSpike
from torchzero_clip.published import NAMES

MakeChain: TypeAlias = "Callable[[], Sequence[Transform]]"
"""A function that returns the transforms of a chain."""
ModelShapes: TypeAlias = "Sequence[tuple[int, ...]]"

SHAPES = [(64, 32), (32,), (48, 64), (5,), (4097,)]
MATRICES = [(64, 32), (48, 64), (16, 16)]
"""ModelShapes for published methods, because some of them accept only matrices."""
MANY_SHAPES = [(64,)] * 40


@dataclass(frozen=True)
class CheckCase:
    """A chain, and the shapes of the parameters on which the chain is checked.

    Attributes:
        name: The name of the chain in the report.
        make: A function that returns the transforms of the chain.
        shapes: The shapes of the parameters.
        has_nan: Whether the gradients of one step contain a NaN.
        reports_loss: Whether the optimizer receives the loss in each step, as a Python number.
        is_optional: Whether the library may refuse to compile or capture the chain.
    """

    name: str
    make: MakeChain
    shapes: ModelShapes = tuple(SHAPES)
    has_nan: bool = False
    reports_loss: bool = False
    is_optional: bool = False


def adamw() -> list[Transform]:
    """Return the links of AdamW."""
    return [Adam(), WeightDecay(0.01), LR(1e-3)]


def clip() -> Transform:
    """Return clipping by the global norm, as in torch."""
    return ClipNorm(1.0, dim="global")


HEADLINE = CheckCase("ClipNorm, AdamW", lambda: [clip(), *adamw()])
"""The chain that torch can compute as well: `clip_grad_norm_` and AdamW."""
MANY_TENSORS = CheckCase(HEADLINE.name, HEADLINE.make, tuple(MANY_SHAPES))
CASES = [
    HEADLINE,
    CheckCase("Guard, ClipNorm, AdamW", lambda: [Guard(), clip(), *adamw()], has_nan=True),
    CheckCase("ZClip, AdamW", lambda: [ZClip(warmup_steps=2), *adamw()]),
    CheckCase("AGC, AdamW", lambda: [AGC(), *adamw()]),
    CheckCase("Adam, ClipNorm", lambda: [Adam(), ClipNorm(1.0), LR(1e-3)]),
    CheckCase(
        "SkipSpike, AdamW",
        lambda: [SkipSpike(window=8, least=2), *adamw()],
        reports_loss=True,
    ),
    CheckCase("AutoClip, AdamW", lambda: [AutoClip(), *adamw()]),
    CheckCase("AdaGC, AdamW", lambda: [AdaGC(), *adamw()]),
    CheckCase("ClipNorm, Momentum", lambda: [clip(), Momentum(0.9), LR(1e-3)]),
    CheckCase("ClipNorm, AdamW, WeightEMA", lambda: [clip(), *adamw(), WeightEMA(0.9)]),
    CheckCase(
        "ClipNorm of p.grad, AdamW",
        lambda: [ClipNorm(1.0, dim="global", target="grad"), *adamw()],
    ),
]
"""The chains that are always checked."""
DTYPE_CASES = CASES[:3]
"""The chains that are checked with parameters in other dtypes."""
MORE_CASES = [
    CheckCase("ClipNorm of each tensor, AdamW", lambda: [ClipNorm(1.0), *adamw()]),
    CheckCase("ClipNormByEMA, AdamW", lambda: [ClipNormByEMA(), *adamw()]),
    CheckCase("ClipNormGrowth, AdamW", lambda: [ClipNormGrowth(), *adamw()]),
    CheckCase("ClipValue, AdamW", lambda: [ClipValue(0.1), *adamw()]),
    CheckCase("ClipNorm of order inf", lambda: [ClipNorm(0.1, ord=float("inf")), *adamw()]),
    CheckCase("ClipNorm to 1e-33", lambda: [ClipNorm(1e-33), LR(1e30)]),
    CheckCase("AdamAtan2", lambda: [AdamAtan2(), LR(1e-3)]),
]
"""Chains that are checked with `everything=True`."""


def published_cases() -> Iterator[CheckCase]:
    """Yield a case for each published method, such as "lamb"."""
    for name, method in sorted(NAMES.items()):
        title = f'named("{name}")'
        yield CheckCase(title, partial(_links_of, method), tuple(MATRICES), is_optional=True)


def _links_of(method: Callable[..., Chain]) -> list[Transform]:
    """Return a chain with the default arguments of a published method."""
    return [method()]
