"""What other libraries do, done here: each row of the table, with the numbers that theirs gave.

`test_peers.py` runs the other side of every row, and holds these numbers against it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip import (
    AGC,
    LR,
    Accumulate,
    Adam,
    AdaptiveClip,
    AutoClip,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Clipper,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    EMARatio,
    Guard,
    Identity,
    Masked,
    Modular,
    Normalize,
    NormalizeByEMA,
    NormRule,
    Partition,
    Scale,
    Standardize,
    Transform,
    ZScoreClip,
    ZStat,
    attach,
    clip_grad_norm_,
    clip_grad_value_,
    per_example_clip,
    spec,
    to_floats,
)

inf, nan = math.inf, math.nan

# ---------------------------------------------------------------------- what both sides are given

WEIGHT = [[1.0, -2.0, 0.5], [0.25, 4.0, -1.0]]
BIAS = [0.5, -1.0]
GRAD = {"weight": [[0.3, -1.2, 0.4], [2.0, 0.1, -0.6]], "bias": [0.7, -0.2]}
SIZES = [1.0, 1.1, 0.9, 1.05, 6.0, 1.0, 0.02, 0.95, 40.0, 1.1]


def gradients(size: float) -> dict[str, Tensor]:
    """The gradients of a step; the bias grows a little slower, so that units differ."""
    return {
        "weight": torch.tensor(GRAD["weight"]) * size,
        "bias": torch.tensor(GRAD["bias"]) * size**0.5,
    }


def parameters() -> dict[str, Parameter]:
    return {"weight": Parameter(torch.tensor(WEIGHT)), "bias": Parameter(torch.tensor(BIAS))}


def steps(sizes: list[float] = SIZES) -> Iterator[dict[str, Tensor]]:
    for size in sizes:
        yield gradients(size)


def numbers(tensors: dict[str, Tensor]) -> list[float]:
    """All entries of a step, or of parameters."""
    return [round(x, 5) for n in ("weight", "bias") for x in tensors[n].flatten().tolist()]


def norms(tensors: dict[str, Tensor]) -> list[float]:
    return [round(tensors[n].double().norm().item(), 5) for n in ("weight", "bias")]


def rewritten(*links: Transform, sizes: list[float] = SIZES, what: Any = norms) -> list[Any]:
    """What a chain makes of the gradients of each step; the parameters stay."""
    params = parameters()
    clipper, out = Clipper(params.items(), *links), []
    for grads in steps(sizes):
        for n, p in params.items():
            p.grad = grads[n]
        clipper.step()
        out.append(what({n: p.grad for n, p in params.items()}))
    return out


def once(*links: Transform) -> list[float]:
    """All entries that a chain makes of the first gradients."""
    out: list[float] = rewritten(*links, sizes=[1.0], what=numbers)[0]
    return out


def trained(
    *links: Transform, sizes: list[float] = SIZES, bad: tuple[int, ...] = ()
) -> list[float]:
    """The parameters after these steps; in some of them the gradients are NaN."""
    params = parameters()
    opt = Modular(params.items(), *links)
    for i, grads in enumerate(steps(sizes)):
        for n, p in params.items():
            p.grad = grads[n] * nan if i in bad else grads[n]
        opt.step()
    return numbers({n: p.detach() for n, p in params.items()})


def is_weight(name: str, p: Tensor) -> bool:
    return name == "weight"


def by_helper(helper: Callable[..., Any], *args: Any, **kwargs: Any) -> list[float]:
    params = parameters()
    for n, p in params.items():
        p.grad = gradients(1.0)[n]
    helper(params.values(), *args, **kwargs)
    return numbers({n: p.grad for n, p in params.items()})


def rate_is_live() -> list[float]:
    params = parameters()
    opt = Modular(params.items(), Scale(1.0), LR(0.1))
    for i, grads in enumerate(steps()):
        opt.param_groups[0]["lr"] = 0.1 / (1 + i)
        for n, p in params.items():
            p.grad = grads[n]
        opt.step()
    return numbers({n: p.detach() for n, p in params.items()})


THREE: dict[str, Any] = {"warmup_steps": 3}
RAW: dict[str, Any] = {"observe": "raw", **THREE}
TENSORS: dict[str, Any] = {"dim": None, "warmup": ClipNorm(1.0), **RAW}
TWICE = [1.0, 1.0, 1.5, 0.5]

OURS: dict[str, Callable[[], list[Any]]] = {
    # drytorch
    "drytorch GradNormClipper": lambda: once(ClipNorm(0.5, dim="global", target="grad")),
    "drytorch GradValueClipper": lambda: once(ClipValue(0.5)),
    "drytorch GradParamNormalizer": lambda: once(Normalize(1)),
    "drytorch GradZScoreNormalizer": lambda: once(Standardize()),
    "drytorch NoOp": lambda: once(Identity()),
    "drytorch HistClipper ZStat": lambda: rewritten(AdaptiveClip(ZStat(), **RAW)),
    "drytorch HistClipper ZStat mean": lambda: rewritten(
        AdaptiveClip(ZStat(clipping="mean"), **RAW)
    ),
    "drytorch HistClipper ZStat max": lambda: rewritten(AdaptiveClip(ZStat(clipping="max"), **RAW)),
    "drytorch HistClipper EMA": lambda: rewritten(AdaptiveClip(EMARatio(), **RAW)),
    "drytorch ParamHistClipper ZStat": lambda: rewritten(AdaptiveClip(ZStat(), **TENSORS)),
    "drytorch ParamHistClipper EMA": lambda: rewritten(AdaptiveClip(EMARatio(), **TENSORS)),
    # declearn
    "declearn L2GlobalClipping": lambda: once(ClipNorm(0.5, dim="global")),
    "declearn L2Clipping": lambda: once(ClipNorm(0.5)),
    # smartclip; the thresholds that each step is judged by
    "smartclip AutoClip": lambda: limits(AutoClip(warmup_steps=5), SIZES[:7]),
    "smartclip AutoClip window": lambda: limits(
        AutoClip("percentile", 60.0, window_size=4, warmup_steps=1)
    ),
    "smartclip ZScoreClip": lambda: limits(ZScoreClip(1.0, 0.9, warmup_steps=2)),
    "smartclip AGC": lambda: once(AGC(0.1, 1e-8, exclude_1d=True, dim=None)),
    "smartclip AGC with vectors": lambda: once(AGC(0.1, 1e-8, dim=None)),
    # torchzero
    "torchzero ClipValue": lambda: once(ClipValue(0.5)),
    "torchzero ClipNorm": lambda: once(ClipNorm(0.5)),
    "torchzero ClipNorm global": lambda: once(ClipNorm(0.5, dim="global")),
    "torchzero ClipNorm rows": lambda: once(ClipNorm(0.5, ord=1, dim=-1)),
    "torchzero Normalize": lambda: once(Normalize(2.0)),
    "torchzero Normalize linf": lambda: once(Normalize(2.0, ord=inf)),
    "torchzero Centralize": lambda: once(Centralize()),
    "torchzero ClipNormByEMA": lambda: rewritten(ClipNormByEMA(0.9)),
    "torchzero NormalizeByEMA": lambda: rewritten(NormalizeByEMA(0.9)),
    "torchzero ClipValueByEMA": lambda: rewritten(ClipValueByEMA(0.9)),
    "torchzero ClipNormGrowth": lambda: rewritten(ClipNormGrowth()),
    "torchzero ClipNormGrowth add": lambda: rewritten(ClipNormGrowth(0.5, None)),
    "torchzero ClipValueGrowth": lambda: rewritten(ClipValueGrowth()),
    # optax
    "optax clip": lambda: once(ClipValue(0.5)),
    "optax clip_by_global_norm": lambda: once(ClipNorm(0.5, dim="global")),
    "optax clip_by_block_rms": lambda: once(ClipRMS(0.5)),
    "optax adaptive_grad_clip": lambda: once(AGC(0.1)),
    "optax centralize": lambda: once(Centralize(dim=0, inverse_dims=True)),
    "optax apply_if_finite": lambda: trained(Guard(), Adam(), LR(0.1), bad=(2, 5)),
    "optax chain": lambda: trained(ClipNorm(0.5, dim="global"), Adam(), LR(0.1)),
    "optax masked": lambda: trained(Masked(ClipNorm(0.5), is_weight), LR(0.1)),
    "optax partition": lambda: trained(
        Partition({"weight": Chain(Adam(), Scale(0.1)), "bias": Scale(0.01)}, lambda name, p: name)
    ),
    "optax inject_hyperparams": rate_is_live,
    "optax MultiSteps": lambda: trained(Accumulate(2), ClipNorm(0.5, dim="global"), LR(0.1)),
    "optax per_example_global_norm_clip": lambda: by_example(ClipNorm(1.25, dim="global")),
    "optax per_example_layer_norm_clip": lambda: by_example(ClipNorm(1.25 / math.sqrt(2))),
    # torch
    "torch clip_grad_norm_": lambda: by_helper(clip_grad_norm_, 0.5, dim="global"),
    "torch clip_grad_norm_ inf": lambda: by_helper(clip_grad_norm_, 0.5, inf, dim="global"),
    "torch clip_grad_value_": lambda: by_helper(clip_grad_value_, 0.5),
}


def by_example(rule: NormRule) -> list[Any]:
    """The sum of the clipped gradients of the steps, as examples of one batch."""

    def loss_fn(params: dict[str, Tensor], *example: Tensor) -> Tensor:
        return sum((p * x).sum() for p, x in zip(params.values(), example, strict=True))

    rows = list(steps())
    batch = [torch.stack([row[name] for row in rows]) for name in GRAD]
    out = per_example_clip(loss_fn, parameters(), batch, rule)
    units = len(rows) * (1 if rule.dim == "global" else len(GRAD))
    sums = {name: grad * len(rows) for name, grad in out.grads.items()}
    return [*numbers(sums), round(out.clipped.item() * units)]


def limits(rule: Transform, sizes: list[float] = SIZES) -> list[float]:
    """The threshold of each step, without those of the warm-up."""
    params = parameters()
    clipper, out = Clipper(params.items(), rule), []
    for grads in steps(sizes):
        for n, p in params.items():
            p.grad = grads[n]
        clipper.step()
        out.append(to_floats(clipper.metrics())[f"{type(rule).__name__}/limit"])
    return [round(x, 5) for x in out if x != inf]


RECORDED: dict[str, list[Any]] = {
    "drytorch GradNormClipper": [
        0.05843,
        -0.23373,
        0.07791,
        0.38954,
        0.01948,
        -0.11686,
        0.13634,
        -0.03895,
    ],
    "drytorch GradValueClipper": [0.3, -0.5, 0.4, 0.5, 0.1, -0.5, 0.5, -0.2],
    "drytorch GradParamNormalizer": [
        0.12187,
        -0.48747,
        0.16249,
        0.81244,
        0.04062,
        -0.24373,
        0.96152,
        -0.27472,
    ],
    "drytorch GradZScoreNormalizer": [
        0.12281,
        -1.25883,
        0.21492,
        1.68867,
        -0.06141,
        -0.70617,
        0.70711,
        -0.70711,
    ],
    "drytorch NoOp": [0.3, -1.2, 0.4, 2.0, 0.1, -0.6, 0.7, -0.2],
    "drytorch HistClipper ZStat": [
        [0.95894, 0.28359],
        [0.96247, 0.27139],
        [0.95469, 0.29761],
        [2.58479, 0.74599],
        [2.58217, 0.31175],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [2.33862, 0.70958],
        [3.11869, 0.14583],
        [2.70788, 0.76354],
    ],
    "drytorch HistClipper ZStat mean": [
        [0.95894, 0.28359],
        [0.96247, 0.27139],
        [0.95469, 0.29761],
        [2.58479, 0.74599],
        [2.55225, 0.30814],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [2.33862, 0.70958],
        [2.82925, 0.13229],
        [2.70788, 0.76354],
    ],
    "drytorch HistClipper ZStat max": [
        [0.95894, 0.28359],
        [0.96247, 0.27139],
        [0.95469, 0.29761],
        [2.58479, 0.74599],
        [3.15686, 0.38114],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [2.33862, 0.70958],
        [8.09055, 0.37831],
        [2.70788, 0.76354],
    ],
    "drytorch HistClipper EMA": [
        [0.95894, 0.28359],
        [0.96247, 0.27139],
        [0.95469, 0.29761],
        [2.58479, 0.74599],
        [2.67858, 0.32339],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [2.33862, 0.70958],
        [2.88492, 0.1349],
        [2.70788, 0.76354],
    ],
    "drytorch ParamHistClipper ZStat": [
        [1.0, 0.72801],
        [1.0, 0.76354],
        [1.0, 0.69065],
        [2.58479, 0.74599],
        [2.49549, 0.73565],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [2.33862, 0.70958],
        [3.01733, 0.80958],
        [2.70788, 0.76354],
    ],
    "drytorch ParamHistClipper EMA": [
        [1.0, 0.72801],
        [1.0, 0.76354],
        [1.0, 0.69065],
        [2.58479, 0.74599],
        [2.58738, 0.76416],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [2.33862, 0.70958],
        [2.77822, 0.77179],
        [2.70788, 0.76354],
    ],
    "declearn L2GlobalClipping": [
        0.05843,
        -0.23373,
        0.07791,
        0.38954,
        0.01948,
        -0.11686,
        0.13634,
        -0.03895,
    ],
    "declearn L2Clipping": [
        0.06093,
        -0.24373,
        0.08124,
        0.40622,
        0.02031,
        -0.12187,
        0.48076,
        -0.13736,
    ],
    "smartclip AutoClip": [19.17419, 17.74521],
    "smartclip AutoClip window": [
        2.5671,
        2.71492,
        2.61637,
        2.66565,
        2.78883,
        2.66565,
        2.66565,
        2.54246,
        2.54246,
    ],
    "smartclip ZScoreClip": [2.66565, 2.672, 2.68581, 7.49876, 7.20501, 6.83475, 6.57698, 41.54805],
    "smartclip AGC": [0.05757, -0.23026, 0.07675, 0.38377, 0.01919, -0.11513, 0.7, -0.2],
    "smartclip AGC with vectors": [
        0.05757,
        -0.23026,
        0.07675,
        0.38377,
        0.01919,
        -0.11513,
        0.1075,
        -0.03071,
    ],
    "torchzero ClipValue": [0.3, -0.5, 0.4, 0.5, 0.1, -0.5, 0.5, -0.2],
    "torchzero ClipNorm": [
        0.06093,
        -0.24373,
        0.08124,
        0.40622,
        0.02031,
        -0.12187,
        0.48076,
        -0.13736,
    ],
    "torchzero ClipNorm global": [
        0.05843,
        -0.23373,
        0.07791,
        0.38954,
        0.01948,
        -0.11686,
        0.13634,
        -0.03895,
    ],
    "torchzero ClipNorm rows": [
        0.07895,
        -0.31579,
        0.10526,
        0.37037,
        0.01852,
        -0.11111,
        0.38889,
        -0.11111,
    ],
    "torchzero Normalize": [
        0.24373,
        -0.97493,
        0.32498,
        1.62489,
        0.08124,
        -0.48747,
        1.92305,
        -0.54944,
    ],
    "torchzero Normalize linf": [0.3, -1.2, 0.4, 2.0, 0.1, -0.6, 2.0, -0.57143],
    "torchzero Centralize": [0.13333, -1.36667, 0.23333, 1.83333, -0.06667, -0.76667, 0.45, -0.45],
    "torchzero ClipNormByEMA": [
        [0.24617, 0.0728],
        [0.36926, 0.1092],
        [0.55388, 0.1638],
        [0.75697, 0.22202],
        [1.13546, 0.33303],
        [1.26809, 0.37253],
        [0.04923, 0.10296],
        [1.26544, 0.38197],
        [1.89817, 0.57296],
        [1.97914, 0.59202],
    ],
    "torchzero NormalizeByEMA": [
        [0.24617, 0.0728],
        [0.36926, 0.1092],
        [0.55388, 0.1638],
        [0.75697, 0.22202],
        [1.13546, 0.33303],
        [1.26809, 0.37253],
        [1.1462, 0.34557],
        [1.26544, 0.38197],
        [1.89817, 0.57296],
        [1.97914, 0.59202],
    ],
    "torchzero ClipValueByEMA": [
        [0.24617, 0.0728],
        [0.49234, 0.14188],
        [0.66466, 0.19675],
        [0.85667, 0.25168],
        [2.24803, 0.40483],
        [2.2694, 0.43715],
        [0.04923, 0.10296],
        [2.07651, 0.43432],
        [11.71568, 0.85132],
        [2.70788, 0.76354],
    ],
    "torchzero ClipNormGrowth": [
        [2.46171, 0.72801],
        [2.70788, 0.76354],
        [2.21554, 0.69065],
        [2.58479, 0.74599],
        [3.87719, 1.11898],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [1.84628, 0.54601],
        [2.76942, 0.81901],
        [2.70788, 0.76354],
    ],
    "torchzero ClipNormGrowth add": [
        [2.46171, 0.72801],
        [2.70788, 0.76354],
        [2.21554, 0.69065],
        [2.58479, 0.74599],
        [3.08479, 1.24599],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [1.73085, 0.70958],
        [2.23085, 1.20958],
        [2.70788, 0.76354],
    ],
    "torchzero ClipValueGrowth": [
        [2.46171, 0.72801],
        [2.70788, 0.76354],
        [2.21554, 0.69065],
        [2.58479, 0.74599],
        [3.87719, 1.11898],
        [2.46171, 0.72801],
        [0.04923, 0.10296],
        [1.84628, 0.54601],
        [2.76942, 0.81901],
        [2.70788, 0.76354],
    ],
    "optax clip": [0.3, -0.5, 0.4, 0.5, 0.1, -0.5, 0.5, -0.2],
    "optax clip_by_global_norm": [
        0.05843,
        -0.23373,
        0.07791,
        0.38954,
        0.01948,
        -0.11686,
        0.13634,
        -0.03895,
    ],
    "optax clip_by_block_rms": [
        0.14926,
        -0.59702,
        0.19901,
        0.99504,
        0.04975,
        -0.29851,
        0.6799,
        -0.19426,
    ],
    "optax adaptive_grad_clip": [
        0.05288,
        -0.2115,
        0.0705,
        0.39519,
        0.01976,
        -0.11856,
        0.1075,
        -0.03071,
    ],
    "optax centralize": [0.46667, -1.03333, 0.56667, 1.5, -0.4, -1.1, 0.7, -0.2],
    "optax apply_if_finite": [
        0.37579,
        -1.37579,
        -0.12421,
        -0.37421,
        3.37579,
        -0.37579,
        -0.21576,
        -0.28424,
    ],
    "optax chain": [0.03015, -1.03015, -0.46985, -0.71985, 3.03015, -0.03015, -0.46097, -0.03903],
    "optax masked": [0.94456, -1.77824, 0.42608, -0.1196, 3.98152, -0.88912, -0.61728, -0.68078],
    "optax partition": [
        0.20684,
        -1.20684,
        -0.29316,
        -0.54316,
        3.20684,
        -0.20684,
        0.38827,
        -0.96808,
    ],
    "optax inject_hyperparams": [
        0.75534,
        -1.02137,
        0.17379,
        -1.38104,
        3.91845,
        -0.51069,
        0.24079,
        -0.92594,
    ],
    "optax MultiSteps": [0.97042, -1.8817, 0.46057, 0.05283, 3.99014, -0.94085, 0.44792, -0.98512],
    "optax per_example_global_norm_clip": [
        1.33235,
        -5.32942,
        1.77647,
        8.88237,
        0.44412,
        -2.66471,
        2.67321,
        -0.76377,
        9,
    ],
    "optax per_example_layer_norm_clip": [
        0.97544,
        -3.90177,
        1.30059,
        6.50296,
        0.32515,
        -1.95089,
        6.73072,
        -1.92306,
        11,
    ],
    "torch clip_grad_norm_": [
        0.05843,
        -0.23373,
        0.07791,
        0.38954,
        0.01948,
        -0.11686,
        0.13634,
        -0.03895,
    ],
    "torch clip_grad_norm_ inf": [0.075, -0.3, 0.1, 0.5, 0.025, -0.15, 0.175, -0.05],
    "torch clip_grad_value_": [0.3, -0.5, 0.4, 0.5, 0.1, -0.5, 0.5, -0.2],
}


def flat(values: list[Any]) -> list[float]:
    return [x for value in values for x in (value if isinstance(value, list) else [value])]


@pytest.mark.parametrize("name", OURS)
def test_the_row_gives_the_numbers_of_the_other_library(name):
    assert flat(OURS[name]()) == pytest.approx(flat(RECORDED[name]), rel=1e-4, abs=2e-5)


# ---------------------------------------------------------------------- rows without such numbers


def test_the_spec_clips_by_the_magnitude_of_max_norm_as_torch_lean_does():
    assert spec.clip_norm([3.0, 4.0], -1.0) == pytest.approx([0.6, 0.8])
    assert spec.clip_norm([Fraction(3), Fraction(4)], Fraction(-5)) == [3, 4]


def test_the_spec_clips_values_between_two_bounds_as_torch_lean_does():
    assert spec.clip_value([-3, -1, 0, 2, 9], -2, 5) == [-2, -1, 0, 2, 5]


@pytest.mark.parametrize(("percentile", "bound"), [(0, 1), (50, 3), (90, 4), (99, 4), (100, 5)])
def test_the_spec_clips_by_a_percentile_as_torch_lean_does(percentile, bound):
    expected = [max(-bound, min(bound, x)) for x in (1, -2, 3, -4, 5)]
    assert spec.clip_percentile([1, -2, 3, -4, 5], percentile) == expected


def test_the_stats_collector_of_drytorch_is_the_warm_up():
    """Its mean and deviation, 3 and 1 here, are what the criterion starts from."""
    p = Parameter(torch.zeros(1))
    opt = Modular([p], AdaptiveClip(ZStat(), **THREE))
    for norm in (2.0, 3.0, 4.0):
        p.grad = torch.tensor([norm])
        opt.step()
    chain = opt.param_groups[0]["chain"]
    assert (chain["AdaptiveClip/mean"].item(), chain["AdaptiveClip/std"].item()) == (3, 1)


def test_a_chain_has_a_config_as_the_modules_of_declearn_have():
    chain = Chain(ClipNorm(1.0, dim="global"), Adam(), LR(0.1))
    config = json.loads(json.dumps(chain.to_config()))
    assert config[0] == {"type": "ClipNorm", "max_norm": 1.0, "dim": "global"}
    assert repr(Chain.from_config(config)) == repr(chain)


def test_attach_is_the_clip_context_of_smartclip_and_metrics_its_on_metrics():
    p = Parameter(torch.zeros(1))
    opt = torch.optim.SGD([p], lr=1.0)
    with attach(opt, ClipNorm(2.0)) as handle:
        p.grad = torch.tensor([8.0])
        opt.step()
        assert p.item() == -2.0
        assert to_floats(handle.metrics()) == {
            "ClipNorm/norm": 8.0,
            "ClipNorm/limit": 2.0,
            "ClipNorm/factor": 0.25,
            "ClipNorm/clipped": 1.0,
        }
    p.grad = torch.tensor([8.0])
    opt.step()
    assert p.item() == -10.0


def test_a_clipper_step_is_the_apply_of_smartclip():
    p = Parameter(torch.zeros(1))
    clipper = Clipper([p], ClipNorm(2.0))
    p.grad = torch.tensor([8.0])
    assert clipper.step().item() == 8.0
    assert (p.grad.item(), p.item()) == (2.0, 0.0)
