"""The adaptive rules compute, step by step, what spec says: several tensors at once."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from torchzero_clip import (
    AGC,
    AdaGC,
    AdaptiveClip,
    AutoClip,
    ClipNorm,
    Clipper,
    Clippy,
    EMAQuantile,
    EMARatio,
    GeometricQuantile,
    Modular,
    P2Quantile,
    Quantile,
    Transform,
    ZClip,
    ZScoreClip,
    ZStat,
    spec,
)

inf, nan = math.inf, math.nan

# Norms without ties, but for those that are drawn twice or special: where a norm meets a threshold
# exactly, rounding decides, and may decide otherwise in another order of the same operations.
generic = st.integers(0, 60).map(lambda seed: random.Random(seed).lognormvariate(0, 1))
spikes = st.integers(0, 9).map(lambda seed: 10 ** random.Random(seed).uniform(-6, 6))
strange = st.sampled_from([0.0, nan, inf])
norms = st.one_of(generic, generic, generic, spikes, strange)
runs = st.lists(st.lists(norms, max_size=20), min_size=1, max_size=3)


@dataclass
class Kernel:
    """A rule, and its specification as a function of (norm, state) with a first state."""

    rule: Callable[[], Transform]
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    number: Callable[[float], Any] = float
    state_of: dict[str, Callable[[Any], float]] = field(default_factory=dict)
    """Names of the rule's state -> the same number in the state of the specification."""


def warmed(
    rule: Callable[..., Any], start: Callable[[Any], Any], steps: int, norm: float = inf
) -> dict[str, Any]:
    """The specification of a rule behind a warm-up."""
    step = partial(spec.adaptive_clip, rule=rule, start=start, warmup_steps=steps, warmup_norm=norm)
    return {"step": step, "state": spec.WarmUp()}


def observed(rule: Callable[..., Any], state: Any) -> Callable[[Sequence[Any]], Any]:
    """The start of a criterion that sees the norms of the warm-up one by one."""
    return lambda seen: spec.run(rule, seen, state)[1]


def moments(name: str) -> dict[str, Callable[[Any], float]]:
    return {f"{name}/mean": lambda s: s.mean, f"{name}/std": lambda s: math.sqrt(s.var)}


def z_stat(clipping: Any, observe: str) -> Kernel:
    rule = partial(spec.z_stat, alpha=0.8, z_thresh=1.5, clipping=clipping, observe=observe)
    return Kernel(
        lambda: AdaptiveClip(ZStat(0.8, 1.5, clipping), None, None, 3, observe),
        **warmed(rule, spec.moments, 3),
        state_of=moments("AdaptiveClip"),
    )


def z_clip(mode: str, max_norm: float | None, skip: bool) -> Kernel:
    def step(n: Any, state: Any) -> Any:
        if not isinstance(state, spec.WarmUp):
            return spec.z_clip(n, state, 0.8, 1.5, max_norm, mode, skip)
        start = partial(spec.moments, unbiased=False)
        norm = inf if max_norm is None else max_norm
        return spec.adaptive_clip(n, state, spec.z_clip, start, 3, norm)

    return Kernel(
        lambda: ZClip(0.8, 1.5, max_norm, 3, mode, skip, dim=None),
        step,
        spec.WarmUp(),
        state_of=moments("ZClip"),
    )


def ema_ratio(clipping: Any, observe: str) -> Kernel:
    rule = partial(spec.ema_ratio, alpha=0.8, r_thresh=1.2, clipping=clipping, observe=observe)
    return Kernel(
        lambda: AdaptiveClip(EMARatio(0.8, 1.2, clipping), None, ClipNorm(1.0), 2, observe),
        **warmed(rule, lambda seen: spec.moments(seen).mean, 2, 1.0),
        state_of={"AdaptiveClip/mean": lambda s: s},
    )


def quantile(q: float, window: int) -> Kernel:
    rule = partial(spec.quantile, q=q, window=window)
    return Kernel(
        lambda: AdaptiveClip(Quantile(q, window), None, ClipNorm(1.0), 2),
        **warmed(rule, observed(rule, ()), 2, 1.0),
    )


def p2(q: float) -> Kernel:
    """From five norms on: before, the specification interpolates and the rule has no limit yet."""
    rule = partial(spec.p2_quantile, q=q)
    return Kernel(
        lambda: AdaptiveClip(P2Quantile(q), None, None, 5),
        **warmed(rule, observed(rule, spec.Markers()), 5),
    )


def ema_quantile(q: float, decay: float) -> Kernel:
    rule = partial(spec.ema_quantile, q=q, ema_decay=decay)
    return Kernel(
        lambda: AdaptiveClip(EMAQuantile(q, decay), None, None, 0),
        rule,
        spec.Tracked(),
        state_of={"AdaptiveClip/quantile": lambda s: s.quantile or 0.0},
    )


def geometric_quantile(q: float, rate: float) -> Kernel:
    rule = partial(spec.geometric_quantile, q=q, rate=rate)
    return Kernel(
        lambda: AdaptiveClip(GeometricQuantile(q, rate), None, None, 0),
        rule,
        0.0,
        state_of={"AdaptiveClip/quantile": lambda s: s},
    )


def z_score(zmax: float, decay: float, steps: int) -> Kernel:
    """In fractions: the average of squares less the square of the average cancels in floats."""
    rule = partial(spec.z_score_clip, zmax=zmax, ema_decay=Fraction(decay))
    return Kernel(
        lambda: ZScoreClip(zmax, decay, steps, dim=None),
        **warmed(rule, observed(rule, spec.Powers()), max(steps, 1)),
        number=lambda x: Fraction(x) if math.isfinite(x) else x,
        state_of={"ZScoreClip/mean": lambda s: s.mean},
    )


def auto_clip(steps: int) -> Kernel:
    return Kernel(
        lambda: AutoClip(warmup_steps=steps, dim=None),
        **warmed(spec.auto_clip, observed(spec.auto_clip, spec.Record()), steps),
        state_of={"AutoClip/mean": lambda s: s.mean, "AutoClip/spread": lambda s: math.sqrt(s.m2)},
    )


def auto_percentile(history: str) -> Kernel:
    rules: dict[str, Any] = {
        "window": (partial(spec.quantile, q=0.7, window=5), ()),
        "ema": (partial(spec.ema_quantile, q=0.7, ema_decay=0.8), spec.Tracked()),
    }
    rule, state = rules[history]
    return Kernel(
        lambda: AutoClip("percentile", 70.0, history, 5, 0.8, 3, dim=None),
        **warmed(rule, observed(rule, state), 3),
    )


def double(z: Any, t: Any) -> Any:
    return t + t


KERNELS = {
    "ZStat": z_stat("reciprocal", "clipped"),
    "ZStat raw": z_stat("reciprocal", "raw"),
    "ZStat mean": z_stat("mean", "clipped"),
    "ZStat max": z_stat("max", "raw"),
    "ZStat own": z_stat(double, "clipped"),
    "ZClip": z_clip("adaptive", None, False),
    "ZClip bounded": z_clip("adaptive", 0.5, False),
    "ZClip mean": z_clip("mean", None, False),
    "ZClip percentile": z_clip("percentile", 2.0, False),
    "ZClip skip": z_clip("adaptive", None, True),
    "EMARatio": ema_ratio("max", "raw"),
    "EMARatio mean": ema_ratio("mean", "raw"),
    "EMARatio reciprocal": ema_ratio("reciprocal", "clipped"),
    "Quantile": quantile(0.6, 4),
    "Quantile of one": quantile(0.5, 1),
    "Quantile lowest": quantile(0.0, 7),
    "P2Quantile": p2(0.5),
    "P2Quantile high": p2(0.95),
    "EMAQuantile": ema_quantile(0.9, 0.7),
    "GeometricQuantile": geometric_quantile(0.7, 0.4),
    "ZScoreClip": z_score(1.0, 0.75, 0),
    "ZScoreClip later": z_score(2.0, 0.5, 4),
    "AutoClip": auto_clip(5),
    "AutoClip window": auto_percentile("window"),
    "AutoClip ema": auto_percentile("ema"),
}
EVERY = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if " " in n or n == "ZClip" else ()) for n in KERNELS],
)
"""Of a rule with other arguments after a space, the first alone is quick; the authors' code tests
ZClip, AdaGC and AGC in `tests/identities`."""


def close(expected: float) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-300, nan_ok=True)


def follow(make: Callable[[], Transform], rows: Sequence[Sequence[float]]) -> Any:
    """For each step what came out of every tensor, None where it had no gradient; the optimizer."""
    params = [Parameter(torch.zeros(1, dtype=torch.float64)) for _ in rows]
    opt, outs = Modular(params, make()), []
    for step in zip_longest(*rows):
        for p, x in zip(params, step, strict=True):
            p.data.zero_()
            p.grad = None if x is None else torch.tensor([x], dtype=torch.float64)
        opt.step()
        outs.append([None if p.grad is None else -p.item() for p in params])
    return outs, params, opt


@EVERY
@given(rows=runs)
def test_a_rule_is_its_specification_tensor_by_tensor(name, rows):
    kernel = KERNELS[name]
    outs, params, opt = follow(kernel.rule, rows)
    for i, row in enumerate(rows):
        state = kernel.state
        for step, x in enumerate(row):
            expected, state = kernel.step(kernel.number(x), state)
            assert outs[step][i] == close(float(expected)), (i, step)
        if row and not isinstance(state, spec.WarmUp):
            for key, read in kernel.state_of.items():
                if opt.state[params[i]]:
                    assert opt.state[params[i]][key].item() == pytest.approx(
                        float(read(state) or 0), rel=1e-9, abs=1e-12
                    )


@pytest.mark.slow
@given(rows=runs, warmup_steps=st.integers(0, 5), rel=st.sampled_from([0.0, 0.5, 1.05, 2.0]))
def test_ada_gc_is_its_specification_and_warms_up_by_the_norm_of_all(rows, warmup_steps, rel):
    outs, params, opt = follow(lambda: AdaGC(rel, 1.0, 0.8, warmup_steps), rows)
    states = [spec.Reference()] * len(rows)
    for step, row in enumerate(zip_longest(*rows)):
        given_ = [x for x in row if x is not None]
        total = nan if any(map(math.isnan, given_)) else math.hypot(*given_)
        for i, x in enumerate(row):
            if x is None:
                continue
            expected, states[i] = spec.ada_gc(
                x, states[i], rel, 1.0, 0.8, warmup_steps, total=total
            )
            assert outs[step][i] == close(expected)
    for p, row, state in zip(params, rows, states, strict=True):
        if row:
            assert opt.state[p]["AdaGC/gamma"].item() == close(state.gamma)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=5),
    st.sampled_from([0.01, 0.5, 1.0]),
    st.sampled_from([1e-3, 1.0]),
)
def test_agc_is_its_specification_row_by_row(pairs, clipping, eps):
    weights, grads = [[w for w, _ in pairs]] * 2, [[g for _, g in pairs], [g / 8 for _, g in pairs]]
    p = Parameter(torch.tensor(weights, dtype=torch.float64))
    p.grad = torch.tensor(grads, dtype=torch.float64)
    before = p.detach().clone()
    Modular([p], AGC(clipping, eps)).step()
    for row, (g, w) in enumerate(zip(grads, weights, strict=True)):
        expected = torch.tensor(spec.agc(g, w, clipping, eps), dtype=torch.float64)
        torch.testing.assert_close(before[row] - p.detach()[row], expected, rtol=1e-9, atol=1e-9)


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_clippy_is_its_specification(pairs, relative, absolute):
    weights, steps = [w for w, _ in pairs], [u for _, u in pairs]
    p = Parameter(torch.tensor(weights, dtype=torch.float64))
    p.grad = torch.tensor(steps, dtype=torch.float64)
    Clipper([p], Clippy(relative, absolute)).step()
    expected = torch.tensor(spec.clippy(steps, weights, relative, absolute), dtype=torch.float64)
    torch.testing.assert_close(p.grad, expected, rtol=1e-9, atol=1e-300)
