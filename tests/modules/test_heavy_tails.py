"""Long and troubled sequences of norms: nothing is poisoned, and every rule finds its way back."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    AdaGC,
    AdaptiveClip,
    AutoClip,
    ClipNormGrowth,
    EMAQuantile,
    EMARatio,
    Modular,
    P2Quantile,
    Quantile,
    SpikeClip,
    Transform,
    ZClip,
    ZScoreClip,
    ZStat,
    spec,
)

inf, nan = math.inf, math.nan


@dataclass
class Rule:
    """A rule, its specification, and the threshold that a state of the specification means."""

    make: Callable[[], Transform]
    step: Callable[[Any, Any], tuple[Any, Any]]
    threshold: Callable[[Any], float]
    start: Callable[[Sequence[float]], Any]
    warmup: int = 20
    traced: bool = True
    """Two roundings of one run stay close to each other."""


def after(step: Any, state: Any) -> Callable[[Sequence[float]], Any]:
    return lambda seen: spec.run(step, seen, state)[1]


def scores(make: Callable[[], Transform], step: Any, start: Any, warmup: int) -> Rule:
    return Rule(make, step, lambda s: s.mean + 2.5 * math.sqrt(s.var), start, warmup)


def adaptive(criterion: Any, **kw: Any) -> Callable[[], Transform]:
    return lambda: AdaptiveClip(criterion, None, None, **kw)


def z_stat(clipping: str, observe: str = "clipped") -> Rule:
    step = partial(spec.z_stat, clipping=clipping, observe=observe)
    return scores(adaptive(ZStat(clipping=clipping), observe=observe), step, spec.moments, 20)


def z_clip(mode: str) -> Rule:
    step = partial(spec.z_clip, max_norm=None, mode=mode)
    start = partial(spec.moments, unbiased=False)
    return scores(lambda: ZClip(max_norm=None, mode=mode, dim=None), step, start, 25)


def p2(q: float) -> Rule:
    step = partial(spec.p2_quantile, q=q)
    threshold = partial(spec.p2_estimate, q=q)
    return Rule(adaptive(P2Quantile(q)), step, threshold, after(step, spec.Markers()))


def z_score_state(step: Any) -> Rule:
    return Rule(
        lambda: ZScoreClip(dim=None),
        step,
        lambda s: spec.z_score_threshold(s, 3),
        after(step, spec.Powers()),
        traced=False,  # the specification subtracts squares, which cancel in floats
    )


WINDOW = partial(spec.quantile, q=0.95, window=256)
ADA = partial(spec.ada_gc, absolute=inf)
RULES = {
    "ZStat": z_stat("reciprocal"),
    "ZStat mean": z_stat("mean"),
    "ZStat max": z_stat("max"),
    "ZStat raw": z_stat("reciprocal", "raw"),
    "EMARatio": Rule(
        adaptive(EMARatio()),
        spec.ema_ratio,
        lambda mean: 1.05 * mean,
        lambda seen: spec.moments(seen).mean,
    ),
    "Quantile": Rule(
        adaptive(Quantile(0.95, 256)),
        WINDOW,
        lambda seen: spec.interpolated_quantile(seen, 0.95),
        after(WINDOW, ()),
    ),
    "P2Quantile": p2(0.95),
    "P2Quantile median": p2(0.5),
    "EMAQuantile": Rule(
        adaptive(EMAQuantile(0.95)),
        spec.ema_quantile,
        lambda s: s.quantile,
        after(spec.ema_quantile, spec.Tracked()),
    ),
    "ZClip": z_clip("adaptive"),
    "ZClip mean": z_clip("mean"),
    "ZClip percentile": z_clip("percentile"),
    "AutoClip": Rule(
        lambda: AutoClip(dim=None),
        spec.auto_clip,
        lambda s: spec.p2_estimate(s.markers, 0.5) + 3 * math.sqrt(s.m2 / (s.steps - 1)),
        after(spec.auto_clip, spec.Record()),
    ),
    "ZScoreClip": z_score_state(spec.z_score_clip),
    "AdaGC": Rule(
        lambda: AdaGC(abs=inf, warmup_steps=20),
        partial(ADA, warmup_steps=20),
        lambda s: 1.05 * s.gamma,
        after(partial(ADA, warmup_steps=20), spec.Reference()),
    ),
    "ClipNormGrowth": Rule(
        ClipNormGrowth,
        spec.clip_norm_growth,
        spec.growth_limit,
        after(spec.clip_norm_growth, spec.Growth()),
    ),
}
EVERY = pytest.mark.parametrize("name", RULES)


# ---------------------------------------------------------------------- 10,000 norms


def troubled(seed: int, count: int = 10_000) -> list[float]:
    """Heavy tails; jumps of 1e6, zeros, NaN and inf in one step of a hundred."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        norm = rng.paretovariate(1.5) * math.exp(0.2 * rng.gauss(0, 1))
        kind = rng.random()
        if kind < 0.0025:
            norm *= 1e6
        elif kind < 0.01:
            norm = (0.0, nan, inf)[int(kind * 400) - 1]
        out.append(norm)
    return out


def test_the_sequences_are_as_troubled_as_they_say():
    norms = troubled(0)
    bad = [x for x in norms if not 0 < x < 1e4]
    assert 70 < len(bad) < 140
    assert sum(map(math.isnan, norms)) > 10
    assert min(norms.count(inf), norms.count(0.0)) > 10
    assert sum(1e6 < x < inf for x in norms) > 10


@EVERY
@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 3000), *[pytest.param(i, 10_000, marks=pytest.mark.slow) for i in range(3)]],
)
def test_no_threshold_of_the_specification_is_ever_nan(name, seed, count):
    rule, norms = RULES[name], troubled(seed, count)
    state = rule.start([x for x in norms[: rule.warmup] if math.isfinite(x)])
    for norm in norms[rule.warmup :]:
        state = rule.step(norm, state)[1]
        assert 0 <= rule.threshold(state) < inf


class Sequences:
    """Many sequences at once: each is the norms of one tensor."""

    def __init__(self, make: Callable[[], Transform], count: int, dtype: Any = None) -> None:
        self.params = [Parameter(torch.zeros(1, dtype=dtype)) for _ in range(count)]
        self.tfm = make()
        self.opt = Modular(self.params, self.tfm)

    def step(self, norms: Tensor) -> Tensor:
        """What came out, and nothing stays in the parameters."""
        torch._foreach_zero_([p.detach() for p in self.params])
        for p, norm in zip(self.params, norms.unbind(), strict=True):
            p.grad = norm.view(1)
        self.opt.step()
        return -torch.cat([p.detach() for p in self.params])

    def metric(self, kind: str) -> Tensor:
        return self.opt.metrics()[f"{type(self.tfm).__name__}/{kind}"]


def check_sequences(make: Callable[[], Transform], norms: Tensor) -> None:
    """No limit is NaN where a norm is a number, what comes out never exceeds it nor the norm."""
    run = Sequences(make, norms.shape[1], norms.dtype)
    for row in norms:
        out, good = run.step(row), row.isfinite()
        limit = run.metric("limit")[good]
        assert not limit.isnan().any()
        assert (limit >= 0).all()
        assert out[good].isfinite().all()
        assert (out[good] <= row[good]).all()
        assert (out[good] <= limit * 1.00001).all()
    for memory in run.opt.state.values():
        for key, value in memory.items():
            if not key.endswith("/norms"):  # an empty place of a window is NaN
                assert not value.isnan().any(), key


@EVERY
def test_no_threshold_is_ever_nan(name):
    norms = torch.tensor([troubled(seed, 50) for seed in range(30)]).T
    check_sequences(RULES[name].make, norms)


@pytest.mark.slow
@EVERY
def test_no_threshold_is_ever_nan_in_ten_thousand_steps(name):
    norms = torch.tensor([troubled(seed) for seed in range(12)]).T
    check_sequences(RULES[name].make, norms)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.traced])
def test_a_rule_follows_its_specification_for_ten_thousand_steps(name):
    rule, norms = RULES[name], troubled(0)
    norms = [2.0] * 3 + [x for x in norms if math.isfinite(x)]
    run = Sequences(rule.make, 1, torch.float64)
    state = None
    for i, norm in enumerate(norms):
        (out,) = run.step(torch.tensor([norm], dtype=torch.float64)).tolist()
        if i + 1 < rule.warmup:
            continue
        if state is None:
            state = rule.start(norms[: rule.warmup])
            continue
        expected, state = rule.step(norm, state)
        assert out == pytest.approx(expected, rel=1e-6)


def test_entries_are_never_poisoned_either():
    norms = torch.tensor([troubled(seed, 600) for seed in range(12)]).T
    p = Parameter(torch.zeros(12))
    opt = Modular([p], SpikeClip(10.0, 0.99))
    for row in norms:
        p.data.zero_()
        p.grad = row.clone()
        bounded = opt.state[p]["SpikeClip/rms"] > 0 if opt.state.get(p) else row.isfinite()
        opt.step()
        assert p.isfinite()[bounded & ~row.isnan()].all()
        assert opt.state[p]["SpikeClip/rms"].isfinite().all()


@pytest.mark.parametrize(  # test_adaptive.py shows it of the others
    "name",
    [
        pytest.param(n, marks=() if n in ("ZStat", "ClipNormGrowth") else pytest.mark.slow)
        for n in RULES
    ],
)
def test_norms_that_are_no_numbers_change_no_later_threshold(name):
    norms = torch.tensor(troubled(1, 70))
    for i in (0, 4, 15, 24, 30, 31, 50):  # before the warm-up, while it lasts, and after it
        norms[i] = (nan, inf)[i % 2]
    with_bad, without = Sequences(RULES[name].make, 1), Sequences(RULES[name].make, 1)
    outs = [with_bad.step(norm.view(1)) for norm in norms]
    kept = [out for out, norm in zip(outs, norms, strict=True) if norm.isfinite()]
    assert len(kept) <= len(outs) - 7
    for out, norm in zip(kept, norms[norms.isfinite()], strict=True):
        assert out.equal(without.step(norm.view(1)))


# ---------------------------------------------------------------------- the way back

AT = 500


def healthy(seed: int, count: int) -> list[float]:
    rng = random.Random(seed)
    return [math.exp(0.2 * rng.gauss(0, 1)) for _ in range(count)]


def thresholds(rule: Rule, norms: Sequence[float]) -> list[float]:
    state, out = rule.start(norms[: rule.warmup]), []
    for norm in norms[rule.warmup :]:
        out.append(rule.threshold(state))
        state = rule.step(norm, state)[1]
    return out


@cache
def untroubled(name: str, seed: int, count: int) -> list[float]:
    """The thresholds of healthy norms."""
    return thresholds(RULES[name], healthy(seed, count))


def way_back(name: str, trouble: Callable[[list[float]], int], limit: int, tol: float) -> float:
    """How many steps after the trouble the threshold is back, and stays, within a tolerance.

    The median of three runs; `trouble` writes into the norms and returns where it ends.
    """
    rule, found = RULES[name], []
    for seed in range(3):
        norms = healthy(seed, AT + 2 * limit + 100)
        reference = untroubled(name, seed, len(norms))
        end = trouble(norms) - rule.warmup
        rows = zip(thresholds(rule, norms)[end:], reference[end:], strict=True)
        away = [i + 1 for i, (a, b) in enumerate(rows) if not b / tol <= a <= b * tol]
        found.append(away[-1] if away else 0)
    return statistics.median(found)


def spikes(size: float, count: int) -> Callable[[list[float]], int]:
    def trouble(norms: list[float]) -> int:
        norms[AT : AT + count] = [size * x for x in norms[AT : AT + count]]
        return AT + count

    return trouble


def zeros(count: int) -> Callable[[list[float]], int]:
    def trouble(norms: list[float]) -> int:
        norms[AT : AT + count] = [0.0] * count
        return AT + count

    return trouble


def fading(size: float, keep: float, power: float = 1, count: int = 1) -> int:
    """Steps until a spike's share of an average, in its power, is a tenth of that of the rest."""
    share = count * (1 - keep) * size**power
    return math.ceil(math.log(max(10 * share, 1)) / -math.log(keep))


HORIZONS: dict[str, Callable[[float, int], int]] = {  # of (size of the spikes, their number)
    "ZStat": lambda size, count: 0,  # a spike is observed as what it was cut to: about the mean
    "ZStat mean": lambda size, count: 0,
    "ZStat max": lambda size, count: fading(2, 0.97, 2, count),  # cut to the threshold itself
    "ZStat raw": lambda size, count: fading(size, 0.97, 2, count) + 100,
    "EMARatio": lambda size, count: fading(size, 0.98, 1, count),
    "Quantile": lambda size, count: 256,  # the window
    "ZClip": lambda size, count: 0,
    "ZClip mean": lambda size, count: 0,
    "ZClip percentile": lambda size, count: fading(2, 0.97, 2, count),
    "ZScoreClip": lambda size, count: fading(size, 0.99, 2, count) + 200,
    "AdaGC": lambda size, count: 0,
    "ClipNormGrowth": lambda size, count: 10,  # it may have grown by 1.5 a step, and halves
}


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("size", [pytest.param(100.0, marks=pytest.mark.slow), 1e6])
@pytest.mark.parametrize("name", HORIZONS)
def test_after_spikes_a_threshold_is_back_within_its_horizon(name, size, count):
    horizon = HORIZONS[name](size, count)
    assert way_back(name, spikes(size, count), max(horizon, 100), 1.15) <= horizon


@pytest.mark.parametrize(
    ("name", "size", "count", "horizon"),
    [
        ("P2Quantile", 100.0, 1, 1000),
        ("P2Quantile", 100.0, 10, 1000),
        ("P2Quantile median", 100.0, 10, 100),
        pytest.param("P2Quantile median", 1e6, 1, 12_000, marks=pytest.mark.slow),
        ("EMAQuantile", 100.0, 1, 0),
        ("EMAQuantile", 100.0, 10, 1000),
        pytest.param("EMAQuantile", 1e6, 1, 2000, marks=pytest.mark.slow),
        pytest.param("EMAQuantile", 1e6, 10, 17_000, marks=pytest.mark.slow),
    ],
)
def test_streaming_quantiles_need_longer_the_larger_the_spike(name, size, count, horizon):
    """EMAQuantile falls by a factor of 1 - (1 - alpha)(1 - q) a step: log(size) / 0.0005 steps."""
    assert way_back(name, spikes(size, count), max(horizon, 100), 1.15) <= horizon


def test_the_threshold_of_auto_clip_keeps_a_spike_and_forgets_it_as_one_over_the_root_of_steps():
    rule, size = RULES["AutoClip"], 1000.0
    norms = healthy(0, 8000)
    norms[AT] = size
    found = thresholds(rule, norms)
    for step in (1000, 4000, 7900):
        assert found[step - rule.warmup] == pytest.approx(1 + 3 * size / math.sqrt(step), rel=0.05)


@pytest.mark.parametrize("name", [name for name in RULES if "median" not in name])
def test_after_ten_zeros_a_threshold_is_back_soon(name):
    """Ten norms of zero among five hundred move their median for good, as they should."""
    assert way_back(name, zeros(10), 150, 1.15) <= 150


FOLLOWS = {  # a lasting rise to ten times the level, a lasting fall to a tenth
    "ZStat": (None, 300),
    "ZStat mean": (None, 300),
    "ZStat max": (100, 300),
    "ZStat raw": (100, 300),
    "EMARatio": (150, 250),
    "Quantile": (256, 256),
    "P2Quantile": (500, None),
    "P2Quantile median": (2000, None),
    "EMAQuantile": (600, 6000),
    "ZClip": (None, 300),
    "ZClip mean": (None, 300),
    "ZClip percentile": (100, 300),
    "AutoClip": (5000, None),
    "ZScoreClip": (300, 1000),
    "AdaGC": (2400, 300),
    "ClipNormGrowth": (10, 10),
}


@EVERY
@pytest.mark.parametrize("factor", [10.0, 0.1], ids=["rise", "fall"])
@pytest.mark.parametrize("runs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_lasting_change_of_level_is_followed_or_not_as_the_page_says(name, factor, runs):
    """None: not within six thousand steps. A rule that observes what it cut, to the mean or below
    its threshold, never follows a rise; one that counts all norms alike takes as many as it had.
    """
    rule, horizon = RULES[name], FOLLOWS[name][factor < 1]
    ratios = []
    for seed in range(runs):
        norms = healthy(seed, AT + (horizon or 6000))
        reference = [factor * limit for limit in thresholds(rule, norms)]
        norms[AT:] = [factor * norm for norm in norms[AT:]]
        ratios.append(thresholds(rule, norms)[-1] / reference[-1])
    ratio = statistics.median(ratios)
    assert (1 / 1.3 < ratio < 1.3) == (horizon is not None), ratio


@pytest.mark.parametrize(
    ("name", "jump", "steps"),
    [
        ("ZStat max", 4, 24), ("ZStat max", 1e6, 195),
        ("ZStat raw", 4, 6), ("ZStat raw", 1e6, 6),
        ("ZClip percentile", 4, 24), ("ZClip percentile", 1e6, 210),
        ("ZScoreClip", 4, 11), ("ZScoreClip", 1e6, 11),
        ("ClipNormGrowth", 4, 4), ("ClipNormGrowth", 1e6, 35),
    ],
)  # fmt: skip
def test_a_jump_is_followed_in_as_many_steps_as_the_page_says(name, jump, steps):
    """The median of fifteen runs whose norms deviate by a fifth, to two steps."""
    taken = []
    for seed in range(15):
        norms = healthy(seed, AT + 300)
        norms[AT:] = [jump * norm for norm in norms[AT:]]
        after = thresholds(RULES[name], norms)[AT - RULES[name].warmup :]
        taken.append(next(i for i, limit in enumerate(after) if limit >= jump))
    assert abs(statistics.median(taken) - steps) <= 2


@pytest.mark.parametrize("name", [name for name in RULES if "mean" not in name])
def test_zeros_at_the_start_freeze_nothing(name):
    """A matrix that starts at zero gradients, as in LoRA, must come to move."""
    run = Sequences(RULES[name].make, 4)
    for _ in range(30):
        run.step(torch.zeros(4))
    kept = torch.zeros(4)
    count = 240 if name == "EMAQuantile" else 100
    for i, norms in enumerate(torch.tensor([healthy(seed, count) for seed in range(4)]).T):
        kept += (i >= count - 40) * run.step(norms) / norms / 40
    assert (kept > 0.6).all()
