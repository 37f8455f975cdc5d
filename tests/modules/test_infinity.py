"""Which arguments accept infinity, what infinity does there, and that NaN is refused everywhere."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.modules.rows.descent import heads
from tests.modules.test_arguments import constructions, fields
from torchzero_clip import (
    AGC,
    ASGD,
    CAME,
    LR,
    Adafactor,
    AdaGC,
    AdaptiveClip,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Clippy,
    ClipRMS,
    ClipSpectral,
    ClipValue,
    ClipValueGrowth,
    DAdaptAdam,
    DeltaClip,
    EMARatio,
    MaxNorm,
    Modular,
    NAdam,
    NanToNum,
    NormalizeByEMA,
    Prodigy,
    QKClip,
    Rprop,
    SkipLarge,
    SkipSpike,
    SoftClip,
    SpikeClip,
    Transform,
    TrustRatio,
    ZClip,
    ZScoreClip,
    ZStat,
    clip_grad_norm_,
)
from torchzero_clip.core.description import Description
from torchzero_clip.published import NAMES, named

inf, nan = math.inf, math.nan
LARGE = 1e30  # no norm and no number of steps in this file comes near it


def judged(criterion: Description) -> AdaptiveClip:
    """A rule that clips by a criterion, from the third step on."""
    return AdaptiveClip(criterion, warmup=None, warmup_steps=2)


NO_LIMIT: dict[tuple[str, str], tuple[Callable[[Any], Transform], float | None]] = {
    ("AGC", "clipping"): (AGC, LARGE),
    ("ASGD", "t0"): (lambda x: ASGD(t0=x), LARGE),
    ("AdaGC", "abs"): (lambda x: AdaGC(abs=x, warmup_steps=3), LARGE),
    ("AdaGC", "rel"): (lambda x: AdaGC(rel=x, warmup_steps=1), LARGE),
    ("Adafactor", "d"): (lambda x: Adafactor(d=x), LARGE),
    ("CAME", "clip_threshold"): (lambda x: CAME(clip_threshold=x), LARGE),
    ("ClipNorm", "max_norm"): (ClipNorm, LARGE),
    ("ClipNormByEMA", "max_ema_growth"): (lambda x: ClipNormByEMA(max_ema_growth=x), None),
    ("ClipNormGrowth", "add"): (lambda x: ClipNormGrowth(add=x, mul=None), LARGE),
    ("ClipNormGrowth", "max_decay"): (lambda x: ClipNormGrowth(max_decay=x), None),
    ("ClipNormGrowth", "min_value"): (lambda x: ClipNormGrowth(min_value=x), LARGE),
    ("ClipNormGrowth", "mul"): (lambda x: ClipNormGrowth(mul=x, min_value=None), LARGE),
    ("ClipRMS", "max_rms"): (ClipRMS, LARGE),
    ("ClipSpectral", "max_norm"): (ClipSpectral, LARGE),
    ("ClipValue", "value"): (ClipValue, LARGE),
    ("ClipValueGrowth", "add"): (lambda x: ClipValueGrowth(add=x, mul=None), LARGE),
    ("ClipValueGrowth", "max_decay"): (lambda x: ClipValueGrowth(max_decay=x), None),
    ("ClipValueGrowth", "min_value"): (lambda x: ClipValueGrowth(min_value=x), LARGE),
    ("ClipValueGrowth", "mul"): (lambda x: ClipValueGrowth(mul=x, min_value=None), LARGE),
    ("Clippy", "absolute"): (lambda x: Clippy(absolute=x), LARGE),
    ("DAdaptAdam", "growth_rate"): (lambda x: DAdaptAdam(growth_rate=x), LARGE),
    ("DeltaClip", "max_norm"): (DeltaClip, LARGE),
    ("EMARatio", "r_thresh"): (lambda x: judged(EMARatio(r_thresh=x)), LARGE),
    ("MaxNorm", "max_norm"): (MaxNorm, LARGE),
    ("NAdam", "momentum_decay"): (lambda x: NAdam(momentum_decay=x), LARGE),
    ("NormalizeByEMA", "max_ema_growth"): (lambda x: NormalizeByEMA(max_ema_growth=x), None),
    ("Prodigy", "growth_rate"): (lambda x: Prodigy(growth_rate=x), LARGE),
    ("QKClip", "tau"): (lambda x: QKClip(heads, tau=x), LARGE),
    ("Rprop", "step_sizes"): (lambda x: Rprop(step_sizes=(1e-6, x)), LARGE),
    ("SkipLarge", "max_norm"): (SkipLarge, LARGE),
    ("SkipSpike", "sigmas"): (lambda x: SkipSpike(sigmas=x, window=4, least=2), LARGE),
    ("SoftClip", "max_norm"): (SoftClip, LARGE),
    ("SpikeClip", "threshold"): (SpikeClip, LARGE),
    ("TrustRatio", "bounds"): (lambda x: TrustRatio(bounds=(0.0, x)), LARGE),
    ("ZClip", "max_norm"): (lambda x: ZClip(max_norm=x, warmup_steps=2), None),
    ("ZClip", "z_thresh"): (lambda x: ZClip(z_thresh=x, warmup_steps=2), LARGE),
    ("ZScoreClip", "zmax"): (lambda x: ZScoreClip(zmax=x, warmup_steps=2), LARGE),
    ("ZStat", "z_thresh"): (lambda x: judged(ZStat(z_thresh=x)), LARGE),
}
"""The arguments for which infinity means that there is no limit.

Each item has a rule that receives the argument, and a value with the same effect as infinity.
"""
KEPT = {("NanToNum", "posinf"), ("NanToNum", "neginf")}
"""The arguments for which infinity keeps the infinite elements of an update."""


def with_number(value: Any, number: float) -> list[Any]:
    """A usual value of an argument after a number replaced it, or one element of a tuple."""
    if not isinstance(value, tuple):
        return [number]
    return [(*value[:i], number, *value[i + 1 :]) for i in range(len(value))]


def accepts(make: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    try:
        make(**arguments)
    except (TypeError, ValueError):
        return False
    return True


def accepting(number: float) -> set[tuple[str, str]]:
    """The arguments of all rules and criteria that accept a number, by class and name."""
    found = set()
    for cls, args in constructions():
        for name in set(fields(cls)) & set(inspect.signature(cls).parameters):
            kind = cls._kinds.get(name)
            if kind is not None and kind.python_type is float:
                usual = args.get(name, cls.__dataclass_fields__[name].default)
                values = with_number(usual, number)
                if any([accepts(cls, {**args, name: value}) for value in values]):
                    found.add((cls.__name__, name))
    return found


def test_infinity_is_accepted_only_if_it_means_something():
    assert accepting(inf) == {*NO_LIMIT, *KEPT}
    assert accepting(-inf) == KEPT


def test_nan_is_accepted_by_no_rule():
    assert accepting(nan) == set()


def trained(rule: Transform, zeros: bool, **engine: Any) -> list[torch.Tensor]:
    """Matrices after five steps with gradients of growing size.

    With `zeros`, the weights start at 0, and the first two gradients are 0.
    """
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.zeros(4, 3)), Parameter(torch.zeros(2, 5))]
    if not zeros:
        for p in params:
            p.data.normal_(generator=generator)
    last = isinstance(rule, (MaxNorm, QKClip))
    chain = [LR(0.1), rule] if last else [rule, LR(0.1)]
    if isinstance(rule, (ASGD, DAdaptAdam, Rprop)):
        chain = [rule]
    opt = Modular(params, *chain, **engine)
    for step in range(5):
        size = 0.0 if zeros and step < 2 else 10.0**step
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) * size
        opt.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("zeros", [False, True], ids=["weights", "zeros"])
@pytest.mark.parametrize(("cls", "name"), NO_LIMIT)
def test_infinity_acts_as_no_limit(cls, name, zeros):
    make, same = NO_LIMIT[cls, name]
    expected = trained(make(same), zeros)
    assert all([p.isfinite().all() for p in expected])
    for engine in ({}, {"fused": False}):
        torch.testing.assert_close(trained(make(inf), zeros, **engine), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name"), NO_LIMIT)
def test_infinity_acts_as_no_limit_in_a_compiled_step(cls, name):
    make, same = NO_LIMIT[cls, name]
    for zeros in (False, True):
        expected = trained(make(same), zeros)
        torch.testing.assert_close(trained(make(inf), zeros, compile=True), expected)


@pytest.mark.parametrize("compile", [False, True])
def test_infinity_keeps_infinite_elements(compile):
    p = Parameter(torch.zeros(3))
    opt = Modular([p], NanToNum(0.0, inf, -inf), compile=compile)
    p.grad = torch.tensor([nan, inf, -inf])
    opt.step()
    assert p.tolist() == [0.0, -inf, inf]


def test_the_function_that_clips_gradients_accepts_infinity_as_its_largest_norm_only():
    p = Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([p], inf) == 5
    assert p.grad.tolist() == [3.0, 4.0]
    for limits in ({"max_norm": None, "min_norm": inf}, {"max_norm": inf, "min_norm": inf}):
        with pytest.raises(ValueError, match="min_norm must be a finite number of at least 0 or N"):
            clip_grad_norm_([p], **limits)
    with pytest.raises(
        ValueError, match="max_norm must be a number of at least 0 or None, got nan"
    ):
        clip_grad_norm_([p], nan)
    assert p.grad.tolist() == [3.0, 4.0]


def numbers_of(method: str) -> dict[str, Any]:
    """The arguments of a method whose usual values are floats, or tuples of floats."""
    parameters = inspect.signature(NAMES[method]).parameters.values()
    usual = {p.name: p.default for p in parameters}
    return {
        name: value
        for name, value in usual.items()
        if isinstance(value, float)
        or (isinstance(value, tuple) and all([isinstance(x, float) for x in value]))
    }


@pytest.mark.parametrize("method", sorted(NAMES))
def test_no_method_accepts_nan_or_minus_infinity(method):
    for (name, usual), number in itertools.product(numbers_of(method).items(), (nan, -inf)):
        for value in with_number(usual, number):
            with pytest.raises(ValueError, match="got "):
                named(method, **{name: value})
