"""What other libraries do, done here: each row of the table, with the numbers that theirs gave.

Both sides take the same steps, in which the live values of the row change. What theirs gave lies in
`recorded.pt`; `test_peers.py` runs their side of every row, and holds these numbers against it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.identities.follow import Trajectory, stacked
from tests.identities.identity import apart
from torchzero_clip import (
    AGC,
    LR,
    Accumulate,
    Adagrad,
    Adam,
    AdaptiveClip,
    AutoClip,
    Cautious,
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
    Grokfast,
    Guard,
    Identity,
    Lion,
    Masked,
    Modular,
    Momentum,
    Normalize,
    NormalizeByEMA,
    NormRule,
    Partition,
    RMSprop,
    Scale,
    SkipSpike,
    StableAdam,
    Standardize,
    Transform,
    WeightDecay,
    ZScoreClip,
    ZStat,
    attach,
    clip_grad_norm_,
    clip_grad_value_,
    per_example_clip,
    spec,
    to_floats,
)

RECORDED = Path(__file__).parent / "recorded.pt"
RTOL = 1e-5
"""How far the two may be apart, over the largest entry of a tensor in a step: rounding, and eps."""

inf, nan = math.inf, math.nan

# ---------------------------------------------------------------------- what both sides are given

SHAPES = {"kernel": (2, 3, 1, 2), "weight": (2, 3), "bias": (2,)}
SIZES = [
    1.0, 1.1, 0.9, 1.05, 6.0, 1.0, 0.02, 0.95, 40.0, 1.1, 1.3, 0.8,
    0.0, 1.2, 1.0, 9.0, 1.1, 0.7, 1e-3, 1.0, 2.5, 1.0, 15.0, 0.9,
]  # fmt: skip
STEPS = len(SIZES)


@functools.cache
def drawn(name: str, step: int) -> Tensor:
    """Normal numbers that depend on the name and the step alone."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "big")
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def gradients(step: int) -> dict[str, Tensor]:
    """The gradients of a step; those of the bias grow slower, so that units differ."""
    size = SIZES[step]
    return {n: drawn(n, step) * (size**0.5 if n == "bias" else size) for n in SHAPES}


def parameters() -> dict[str, Parameter]:
    return {n: Parameter(drawn(n, -1).clone()) for n in SHAPES}


def give(params: dict[str, Any], step: int, factor: float = 1.0) -> None:
    for n, grad in gradients(step).items():
        params[n].grad = grad * factor


def falling(step: int) -> float:
    """What live values are multiplied with."""
    return 0.97**step


def rising(step: int) -> float:
    return 1.03**step


def rate(step: int) -> float:
    """A learning rate: a warm-up, then a decay."""
    return 0.1 * min(1.0, (step + 1) / 5) * falling(step)


Live = Callable[[int], dict[str, Any]]
"""The live values of a step by their names."""


def constant(step: int) -> dict[str, Any]:
    return {}


def grads_of(params: dict[str, Any]) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in params.items()}


def values_of(params: dict[str, Any]) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in params.items()}


# ---------------------------------------------------------------------- our side


def rewritten(*links: Transform, live: Live = constant) -> Trajectory:
    """What a chain makes of the gradients of each step; the parameters stay."""
    params, steps = parameters(), []
    clipper = Clipper(params.items(), *links)
    for i in range(STEPS):
        give(params, i)
        clipper.param_groups[0].update(live(i))
        clipper.step()
        steps.append(grads_of(params))
    return stacked(steps)


def trained(
    *links: Transform, live: Live = constant, bad: Iterable[int] = (), losses: bool = False
) -> Trajectory:
    """The parameters after each step; in the bad ones the gradients are NaN."""
    params, steps = parameters(), []
    opt = Modular(params.items(), *links)
    for i in range(STEPS):
        give(params, i, nan if i in bad else 1.0)
        opt.param_groups[0].update(live(i))
        if losses:
            opt.report(loss=loss_of(i))
        opt.step()
        steps.append(values_of(params))
    return stacked(steps)


def loss_of(step: int) -> Tensor:
    """A loss that falls, with noise, and one step where it spikes alone."""
    return torch.tensor(3.0 * falling(step) + 0.1 * math.sin(5.0 * step) + 9 * (step == 13))


def limits(rule: Transform, live: Live = constant, first: int = 0, end: int = STEPS) -> Trajectory:
    """The limit that each step is judged by."""
    params, seen = parameters(), []
    clipper = Clipper(params.items(), rule)
    for i in range(end):
        give(params, i)
        clipper.param_groups[0].update(live(i))
        clipper.step()
        limit = to_floats(clipper.metrics())[f"{type(rule).__name__}/limit"]
        seen.append({"limit": torch.tensor([limit], dtype=torch.float64)})
    return stacked(seen[first:])


def with_sgd(make: Callable[[Any, Any], Callable[[], Any]], live: Live) -> Trajectory:
    """torch's SGD whose gradients are clipped first; `make(params, opt)` is what does a step."""
    params, steps = parameters(), []
    opt = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)
    step = make(params, opt)
    for i in range(STEPS):
        give(params, i)
        opt.param_groups[0]["lr"] = rate(i)
        step(live(i))
        steps.append(values_of(params))
    return stacked(steps)


def clipped_and_stepped(params: Any, opt: Any) -> Any:
    clipper = Clipper(params.items(), AGC(0.1, 1e-8, exclude_1d=True, dim=None))

    def step(live: dict[str, Any]) -> None:
        clipper.param_groups[0].update(live)
        clipper.step()
        opt.step()

    return step


def attached(params: Any, opt: Any) -> Any:
    handle = attach(opt, AGC(0.1, 1e-8, exclude_1d=True, dim=None))

    def step(live: dict[str, Any]) -> None:
        handle.param_groups[0].update(live)
        opt.step()

    return step


def helped(helper: Callable[..., Any], start: float, *args: Any, **kwargs: Any) -> Trajectory:
    """What a function of parameters and a falling threshold makes of their gradients."""
    params, steps = parameters(), []
    for i in range(STEPS):
        give(params, i)
        helper(params.values(), start * falling(i), *args, **kwargs)
        steps.append(grads_of(params))
    return stacked(steps)


def by_example(rule: NormRule) -> Trajectory:
    """The sum of the clipped gradients of the steps, as examples of one batch."""

    def loss_fn(params: dict[str, Tensor], *example: Tensor) -> Tensor:
        return sum((p * x).sum() for p, x in zip(params.values(), example, strict=True))

    rows = [gradients(i) for i in range(STEPS)]
    batch = [torch.stack([row[n] for row in rows]) for n in SHAPES]
    out = per_example_clip(loss_fn, parameters(), batch, rule)
    units = STEPS * (1 if rule.dim == "global" else len(SHAPES))
    sums = {n: grad.unsqueeze(0) * STEPS for n, grad in out.grads.items()}
    return {**sums, "clipped": torch.tensor([[round(out.clipped.item() * units)]])}


def is_weight(name: str, p: Tensor) -> bool:
    return name == "weight"


RAW: dict[str, Any] = {"observe": "raw", "warmup_steps": 3}
TENSORS: dict[str, Any] = {"dim": None, "warmup": ClipNorm(1.0), **RAW}


def only(key: str, start: float, how: Callable[[int], float] = falling) -> Live:
    return lambda i: {key: start * how(i)}


def lr_only(i: int) -> dict[str, Any]:
    return {"lr": rate(i)}


def of_zstat(i: int) -> dict[str, Any]:
    return {"alpha": 0.97 * falling(i), "z_thresh": 2.5 * falling(i)}


def of_ratio(i: int) -> dict[str, Any]:
    return {"alpha": 0.98 * falling(i), "r_thresh": 1.05 * rising(i)}


def of_adam(i: int) -> dict[str, Any]:
    betas = (0.9 * falling(i), 0.99 * falling(i))
    return {"lr": rate(i), "betas": betas, "eps": 1e-3 * rising(i)}


def of_adamw(i: int) -> dict[str, Any]:
    return {**of_adam(i), "weight_decay": 0.1 * rising(i)}


def of_sgd(i: int) -> dict[str, Any]:
    return {"lr": rate(i), "momentum": 0.9 * falling(i)}


def of_optimi(i: int) -> dict[str, Any]:
    return {"lr": rate(i), "weight_decay": 0.1 * rising(i), "eps": 1e-3 * rising(i)}


def of_lion(i: int) -> dict[str, Any]:
    betas = (0.9 * falling(i), 0.99 * falling(i))
    return {"lr": rate(i), "betas": betas, "weight_decay": 0.1 * rising(i)}


def of_growth(i: int) -> dict[str, Any]:
    return {"add": 0.5 * rising(i), "mul": 1.5 * rising(i), "max_decay": 2.0 * rising(i)}


def of_mul(i: int) -> dict[str, Any]:
    return {"mul": 1.5 * rising(i), "max_decay": 2.0 * rising(i)}


def of_average(i: int) -> dict[str, Any]:
    return {"beta": 0.9 * falling(i), "max_ema_growth": 1.5 * rising(i)}


def of_score(i: int) -> dict[str, Any]:
    return {"zmax": 1.0 * rising(i), "ema_decay": 0.9 * falling(i)}


def decayed_otherwise(i: int) -> dict[str, Any]:
    """optimi's decay is of the largest learning rate, 0.1."""
    return {**of_optimi(i), "weight_decay": of_optimi(i)["weight_decay"] / 0.1}


ADAM = Adam((0.9, 0.99), eps=1e-6)
OURS: dict[str, Callable[[], Trajectory]] = {
    # drytorch
    "drytorch GradNormClipper": lambda: rewritten(
        ClipNorm(0.5, dim="global", target="grad"), live=only("max_norm", 0.5)
    ),
    "drytorch GradValueClipper": lambda: rewritten(ClipValue(0.5), live=only("value", 0.5)),
    "drytorch GradParamNormalizer": lambda: rewritten(Normalize(1)),
    "drytorch GradZScoreNormalizer": lambda: rewritten(Standardize()),
    "drytorch NoOp": lambda: rewritten(Identity()),
    "drytorch HistClipper ZStat": lambda: rewritten(AdaptiveClip(ZStat(), **RAW), live=of_zstat),
    "drytorch HistClipper ZStat mean": lambda: rewritten(
        AdaptiveClip(ZStat(clipping="mean"), **RAW), live=of_zstat
    ),
    "drytorch HistClipper ZStat max": lambda: rewritten(
        AdaptiveClip(ZStat(clipping="max"), **RAW), live=of_zstat
    ),
    "drytorch HistClipper EMA": lambda: rewritten(AdaptiveClip(EMARatio(), **RAW), live=of_ratio),
    "drytorch ParamHistClipper ZStat": lambda: rewritten(
        AdaptiveClip(ZStat(), **TENSORS), live=of_zstat
    ),
    "drytorch ParamHistClipper EMA": lambda: rewritten(
        AdaptiveClip(EMARatio(), **TENSORS), live=of_ratio
    ),
    # declearn
    "declearn L2GlobalClipping": lambda: rewritten(
        ClipNorm(0.5, dim="global"), live=only("max_norm", 0.5)
    ),
    "declearn L2Clipping": lambda: rewritten(ClipNorm(0.5), live=only("max_norm", 0.5)),
    # smartclip; of those that learn, the limit that each step is judged by
    "smartclip AutoClip": lambda: limits(AutoClip(warmup_steps=5), first=5, end=7),
    "smartclip AutoClip window": lambda: limits(
        AutoClip("percentile", 60.0, window_size=4, warmup_steps=1),
        live=only("percentile", 60.0),
        first=1,
    ),
    "smartclip ZScoreClip": lambda: limits(
        ZScoreClip(1.0, 0.9, warmup_steps=2), live=of_score, first=2
    ),
    "smartclip AGC": lambda: rewritten(
        AGC(0.1, 1e-8, exclude_1d=True, dim=None), live=only("clipping", 0.1)
    ),
    "smartclip AGC with vectors": lambda: rewritten(
        AGC(0.1, 1e-8, dim=None), live=only("clipping", 0.1)
    ),
    "smartclip step": lambda: with_sgd(clipped_and_stepped, only("clipping", 0.1)),
    "smartclip clip_context": lambda: with_sgd(attached, only("clipping", 0.1)),
    # torchzero
    "torchzero ClipValue": lambda: rewritten(ClipValue(0.5), live=only("value", 0.5)),
    "torchzero ClipNorm": lambda: rewritten(ClipNorm(0.5), live=only("max_norm", 0.5)),
    "torchzero ClipNorm global": lambda: rewritten(
        ClipNorm(0.5, dim="global"), live=only("max_norm", 0.5)
    ),
    "torchzero ClipNorm rows": lambda: rewritten(
        ClipNorm(0.5, ord=1, dim=0, inverse_dims=True, min_size=3), live=only("max_norm", 0.5)
    ),
    "torchzero Normalize": lambda: rewritten(Normalize(2.0), live=only("norm_value", 2.0)),
    "torchzero Normalize linf": lambda: rewritten(
        Normalize(2.0, ord="linf", dim=0), live=only("norm_value", 2.0)
    ),
    "torchzero Centralize": lambda: rewritten(Centralize(dim=0)),
    "torchzero ClipNormByEMA": lambda: rewritten(ClipNormByEMA(0.9), live=of_average),
    "torchzero ClipNormByEMA at once": lambda: rewritten(
        ClipNormByEMA(0.9, tensorwise=False, ema_init="update"), live=of_average
    ),
    "torchzero NormalizeByEMA": lambda: rewritten(NormalizeByEMA(0.9), live=of_average),
    "torchzero ClipValueByEMA": lambda: rewritten(ClipValueByEMA(0.9), live=only("beta", 0.9)),
    "torchzero ClipNormGrowth": lambda: rewritten(ClipNormGrowth(), live=of_mul),
    "torchzero ClipNormGrowth add": lambda: rewritten(ClipNormGrowth(0.5), live=of_growth),
    "torchzero ClipNormGrowth at once": lambda: rewritten(
        ClipNormGrowth(parameterwise=False), live=of_mul
    ),
    "torchzero ClipValueGrowth": lambda: rewritten(ClipValueGrowth(), live=of_mul),
    # optax
    "optax clip": lambda: rewritten(ClipValue(0.5), live=only("value", 0.5)),
    "optax clip_by_global_norm": lambda: rewritten(
        ClipNorm(0.5, dim="global"), live=only("max_norm", 0.5)
    ),
    "optax clip_by_block_rms": lambda: rewritten(ClipRMS(0.5), live=only("max_rms", 0.5)),
    "optax adaptive_grad_clip": lambda: rewritten(AGC(0.1), live=only("clipping", 0.1)),
    "optax centralize": lambda: rewritten(Centralize(dim=0, inverse_dims=True)),
    "optax apply_if_finite": lambda: trained(
        Guard(max_consecutive=3), Adam(), LR(0.1), live=lr_only, bad=(2, 5, 6)
    ),
    "optax chain": lambda: trained(
        ClipNorm(0.5, dim="global"),
        Adam(),
        LR(0.1),
        live=lambda i: {**of_adam(i), "max_norm": 0.5 * rising(i)},
    ),
    "optax masked": lambda: trained(Masked(ClipNorm(0.5), is_weight), LR(0.1), live=lr_only),
    "optax partition": lambda: trained(
        Partition(
            {"weight": Chain(Adam(), Scale(0.1)), "rest": Chain(Momentum(0.9), Scale(0.01))},
            lambda name, p: name if name == "weight" else "rest",
        )
    ),
    "optax inject_hyperparams": lambda: trained(Adam(), LR(0.1), live=of_adam),
    "optax MultiSteps": lambda: trained(
        Accumulate(2), ClipNorm(0.5, dim="global"), Adam(), LR(0.1), live=lr_only
    ),
    "optax per_example_global_norm_clip": lambda: by_example(ClipNorm(1.25, dim="global")),
    "optax per_example_layer_norm_clip": lambda: by_example(ClipNorm(1.25 / math.sqrt(3))),
    # torch
    "torch clip_grad_norm_": lambda: helped(clip_grad_norm_, 0.5, dim="global"),
    "torch clip_grad_norm_ inf": lambda: helped(clip_grad_norm_, 0.5, inf, dim="global"),
    "torch clip_grad_value_": lambda: helped(clip_grad_value_, 0.5),
    "torch AdamW": lambda: trained(Adam(), WeightDecay(0.1), LR(0.1), live=of_adamw),
    "torch Adam": lambda: trained(WeightDecay(0.1), Adam(), LR(0.1), live=of_adamw),
    "torch SGD": lambda: trained(Momentum(0.9), LR(0.1), live=of_sgd),
    "torch RMSprop": lambda: trained(
        RMSprop(), LR(0.1), live=lambda i: {"lr": rate(i), "alpha": 0.99 * falling(i), "eps": 1e-3}
    ),
    "torch Adagrad": lambda: trained(
        Adagrad(), LR(0.1), live=lambda i: {"lr": rate(i), "lr_decay": 0.01 * i, "eps": 1e-3}
    ),
    "torch maximize": lambda: trained(Scale(-1), Adam(), WeightDecay(0.1), LR(0.1), live=of_adamw),
    # timm
    "timm norm": lambda: rewritten(ClipNorm(0.5, dim="global"), live=only("max_norm", 0.5)),
    "timm value": lambda: rewritten(ClipValue(0.5), live=only("value", 0.5)),
    "timm agc": lambda: rewritten(AGC(0.1), live=only("clipping", 0.1)),
    # heavyball, in front of its momentum and behind it
    **{
        f"heavyball {name} {where}": lambda links=links: trained(*links, LR(0.1), live=lr_only)
        for name, link in {
            "l2_clip_": ClipNorm(1.0),
            "rmsnorm_clip_": ClipRMS(1.0),
            "global_l2norm_clip": ClipNorm(1.0, dim="global"),
            "global_rmsnorm_clip": ClipNorm(1.0, ord="rms", dim="global"),
        }.items()
        for where, links in {
            "gradient": (link, Momentum(0.9)),
            "update": (Momentum(0.9), link),
        }.items()
    },
    # torch-optimi
    "optimi AdamW": lambda: trained(ADAM, WeightDecay(0.1), LR(0.1), live=of_optimi),
    "optimi AdamW decouple_lr": lambda: trained(
        ADAM, WeightDecay(0.1), LR(0.1), live=decayed_otherwise
    ),
    "optimi StableAdamW": lambda: trained(StableAdam(), LR(0.1), live=of_optimi),
    "optimi StableAdamW decouple_lr": lambda: trained(
        StableAdam(), LR(0.1), live=decayed_otherwise
    ),
    "optimi Lion": lambda: trained(Lion(), WeightDecay(0.1), LR(0.1), live=of_lion),
    "optimi SGD": lambda: trained(Momentum(0.9), LR(0.1), live=of_sgd),
    # OLMo-core
    "OLMo-core SkipStepAdamW": lambda: trained(
        SkipSpike(8, 3.0, least=3, keep_skipped=True),
        Adam(),
        WeightDecay(0.1),
        LR(0.1),
        live=of_adamw,
        losses=True,
    ),
    # what pages say of others
    "timm Lion caution": lambda: trained(
        Lion(), Cautious(), WeightDecay(0.1), LR(0.1), live=of_lion
    ),
    "grokfast gradfilter_ema": lambda: trained(
        Grokfast(0.98, 2.0),
        LR(0.1),
        live=lambda i: {"lr": rate(i), "alpha": 0.98 * falling(i), "lamb": 2.0 * rising(i)},
    ),
}


def defaults_of(call: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(call).parameters.items()}


@functools.cache
def recorded() -> dict[str, Trajectory]:
    return torch.load(RECORDED, weights_only=True)


@pytest.mark.parametrize("name", OURS)
def test_the_row_gives_the_numbers_of_the_other_library(name):
    assert apart(OURS[name](), recorded()[name]) < RTOL


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


@pytest.mark.parametrize("ours", [Adam, RMSprop, Adagrad])
def test_the_defaults_of_a_link_are_those_of_torch(ours):
    theirs = defaults_of(getattr(torch.optim, ours.__name__))
    assert {k: v for k, v in defaults_of(ours).items() if k in theirs} == {
        k: v for k, v in theirs.items() if k in defaults_of(ours)
    }
    assert defaults_of(torch.optim.AdamW)["betas"] == defaults_of(Adam)["betas"]
    assert defaults_of(torch.optim.AdamW)["eps"] == defaults_of(Adam)["eps"]


def test_a_model_of_one_number_is_clipped_as_torch_does_it_with_min_size_one():
    ours, theirs = (Parameter(torch.zeros(1)) for _ in range(2))
    ours.grad, theirs.grad = torch.full((1,), 5.0), torch.full((1,), 5.0)
    clip_grad_norm_([ours], 0.5, dim="global", min_size=1)
    torch.nn.utils.clip_grad_norm_([theirs], 0.5)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_stats_collector_of_drytorch_is_the_warm_up():
    """Its mean and deviation, 3 and 1 here, are what the criterion starts from."""
    p = Parameter(torch.zeros(1))
    opt = Modular([p], AdaptiveClip(ZStat(), warmup_steps=3))
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
