"""Mixed precision: rules see unscaled gradients, and nothing happens in a step with inf."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.helpers import at_once, equal, network, same
from tests.modules.rows.row import with_lr
from tests.table import ROWS
from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    AdaptiveClip,
    ClipNorm,
    EMARatio,
    Guard,
    Modular,
    Orthogonalize,
    WeightDecay,
    ZClip,
    attach,
    release,
    to_floats,
)

inf, nan = math.inf, math.nan
SCALE = 2.0**10

ATTACHED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW single": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "SGD fused": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
EVERY = pytest.mark.parametrize("name", [*ATTACHED, "Modular"])
RULES: dict[str, Callable[[], Any]] = {
    "ClipNorm": lambda: ClipNorm(0.5, dim="global"),
    "ZClip": lambda: ZClip(warmup_steps=2, max_norm=None),
    "AdaptiveClip": lambda: AdaptiveClip(EMARatio(), None, warmup=None, warmup_steps=2),
}
EVERY_RULE = pytest.mark.parametrize("rule", RULES)


def batch(i: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(i)) * (1 + i % 3)


def setup(name: str, model: nn.Module, *links: Any) -> tuple[Any, Any]:
    """An optimizer with these links in front, and whatever has their metrics and state."""
    if name == "Modular":
        opt = Modular(model.parameters(), *links, Adam(), WeightDecay(0.01), LR(0.01))
        return opt, opt
    other = ATTACHED[name](model.parameters())
    return other, attach(other, *links)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=4)


def step(
    model: nn.Module,
    opt: Any,
    x: Tensor,
    scale: torch.amp.GradScaler | None = None,
    dtype: torch.dtype | None = None,
    spoil: float | None = None,
    unscale: bool = False,
    factor: float = 1.0,
) -> None:
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = factor * model(x).float().square().mean()
    (loss if scale is None else scale.scale(loss)).backward()
    if spoil is not None:
        next(model.parameters()).grad.view(-1)[3] = spoil
    if scale is None:
        opt.step()
        return
    if unscale:
        scale.unscale_(opt)
    scale.step(opt)
    scale.update()


def memory(opt: Any, holder: Any) -> list[Any]:
    """Everything that is kept between steps, the counters of a skipped step aside."""
    out: list[Any] = []
    for one in (opt, holder):
        out += [v for held in one.state.values() for v in held.values()]
        out += [v for group in one.param_groups for v in group.get("chain", {}).values()]
    return [v.clone() if isinstance(v, Tensor) else v for v in out]


# ---------------------------------------------------------------------- unscaled gradients


@EVERY_RULE
@EVERY
def test_scaling_changes_no_step(name, rule):
    """The scale is a power of two, so that it rounds nothing."""
    scaled, plain = network(), network()
    ours, _ = setup(name, scaled, RULES[rule]())
    theirs, _ = setup(name, plain, RULES[rule]())
    scale = scaler()
    for i in range(10):
        step(scaled, ours, batch(i), scale)
        step(plain, theirs, batch(i))
        same(scaled.state_dict(), plain.state_dict())
    assert scale.get_scale() > SCALE  # it grew meanwhile


@EVERY
def test_what_is_measured_is_the_norm_of_the_unscaled_gradient(name):
    scaled, plain = network(), network()
    opt, holder = setup(name, scaled, ClipNorm(1e-3, dim="global"))
    step(scaled, opt, batch(0), scaler())
    plain(batch(0)).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), inf).item()
    got = to_floats(holder.metrics())
    assert got["ClipNorm/norm"] == pytest.approx(norm, rel=1e-5)
    assert got["ClipNorm/factor"] == pytest.approx(1e-3 / norm, rel=1e-5)


@EVERY
def test_unscaling_by_hand_first_changes_nothing(name):
    runs = []
    for unscale in (False, True):
        model, scale = network(), scaler()
        opt, _ = setup(name, model, ClipNorm(0.5, dim="global"))
        for i in range(5):
            step(model, opt, batch(i), scale, unscale=unscale)
        runs.append(model)
    same(*(run.state_dict() for run in runs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EVERY
def test_under_autocast_the_steps_are_those_of_clipping_by_hand(name, dtype):
    ours, theirs = network(), network()
    opt, _ = setup(name, ours, ClipNorm(0.5, dim="global"))
    by_hand = ATTACHED["AdamW single" if name == "Modular" else name](theirs.parameters())
    scales = [scaler() if dtype == torch.float16 else None for _ in range(2)]
    for i in range(8):
        step(ours, opt, batch(i), scales[0], dtype)
        theirs.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = theirs(batch(i)).float().square().mean()
        (scales[1].scale(loss) if scales[1] else loss).backward()
        if scales[1]:
            scales[1].unscale_(by_hand)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        scales[1].step(by_hand) if scales[1] else by_hand.step()
        if scales[1]:
            scales[1].update()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- steps with inf


@pytest.mark.parametrize("bad", [inf, pytest.param(nan, marks=pytest.mark.slow)])
@EVERY_RULE
@EVERY
def test_after_a_step_with_inf_the_run_is_what_it_would_have_been(name, rule, bad):
    runs = []
    for spoil in (True, False):
        model, scale = network(), scaler()
        opt, holder = setup(name, model, RULES[rule]())
        for i in range(6):
            if spoil and i in (0, 3, 4):
                step(model, opt, batch(i), scale, spoil=bad)
            step(model, opt, batch(i), scale)
        runs.append((model, opt, holder, scale))
    same(runs[0][0].state_dict(), runs[1][0].state_dict())
    assert equal(memory(*runs[0][1:3]), memory(*runs[1][1:3]))
    assert runs[0][3].get_scale() < runs[1][3].get_scale()


@EVERY
def test_in_a_step_with_inf_nothing_moves_and_nothing_is_measured(name):
    model, scale = network(), scaler()
    opt, holder = setup(name, model, ZClip(warmup_steps=2, max_norm=None))
    for i in range(4):
        step(model, opt, batch(i), scale)
    before = copy.deepcopy(model)
    kept, measured = memory(opt, holder), to_floats(holder.metrics())
    step(model, opt, batch(4), scale, spoil=inf)
    same(model.state_dict(), before.state_dict())
    assert equal(memory(opt, holder), kept)
    assert to_floats(holder.metrics()) == measured
    assert scale.get_scale() == SCALE  # doubled after four steps, halved by this one


@EVERY
def test_a_guard_counts_nothing_that_the_scaler_skipped(name):
    model, scale = network(), scaler()
    opt, holder = setup(name, model, Guard(max_consecutive=1))
    for i in range(4):
        step(model, opt, batch(i), scale, spoil=inf if i % 2 else None)
    assert set(to_floats(holder.metrics()).values()) == {0}


@EVERY
def test_loss_scales_that_overflow_settle_and_training_goes_on(name):
    model = network()
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    opt, holder = setup(name, model, ZClip(warmup_steps=2, max_norm=None))
    before = copy.deepcopy(model)
    for i in range(40):
        step(model, opt, batch(i), scale, factor=1e4)
    assert scale.get_scale() < 2.0**127
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert not any(p.equal(q) for p, q in pairs)
    assert all(p.isfinite().all() for p in model.parameters())
    count = holder.param_groups[0]["chain"]["ZClip/count"].item()
    assert count == 40 - math.log2(2.0**127 / scale.get_scale())


# ---------------------------------------------------------------------- together with others


@pytest.mark.parametrize("name", ATTACHED)
def test_a_removed_rule_leaves_scaled_steps_as_they_were(name):
    runs = []
    for attached in (True, False):
        model, scale = network(), scaler()
        opt = ATTACHED[name](model.parameters())
        if attached:
            attach(opt, ClipNorm(0.0)).remove()
        for i in range(5):
            step(model, opt, batch(i), scale)
        runs.append(model)
    same(*(run.state_dict() for run in runs))


def test_a_scaler_serves_an_attached_and_a_plain_optimizer():
    a, b = network(), network()
    opt, other = (torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (a, b))
    handle, scale = attach(opt, ClipNorm(1e9)), scaler()
    for i in range(4):
        for model in (a, b):
            model.zero_grad()
            scale.scale(model(batch(i)).square().mean()).backward()
        if i == 2:
            next(b.parameters()).grad.fill_(inf)  # one of the two has an inf
            kept = copy.deepcopy(b)
        scale.step(opt)
        scale.step(other)
        scale.update()
        if i == 2:
            same(b.state_dict(), kept.state_dict())
    assert to_floats(handle.metrics())["ClipNorm/clipped"] == [0.0] * 4
    assert next(iter(opt.state.values()))["step"].item() == 4
    assert next(iter(other.state.values()))["step"].item() == 3


def test_accumulation_under_a_scaler_sums_unscaled_gradients():
    small, large = network(), network()
    opt = torch.optim.SGD(small.parameters(), lr=0.1, fused=True)
    attach(opt, Accumulate(2))
    reference, scale = torch.optim.SGD(large.parameters(), lr=0.1), scaler()
    for i in range(4):
        small.zero_grad()
        scale.scale(small(batch(i)).square().mean()).backward()
        scale.step(opt)
        scale.update(SCALE * 2 ** (i % 3))  # the scale changes in the middle of a window
        if i % 2:
            large.zero_grad()
            losses = [large(batch(j)).square().mean() for j in (i - 1, i)]
            (sum(losses) / 2).backward()
            reference.step()
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_parameters_of_half_precision_have_statistics_of_single_precision(dtype):
    p = Parameter(torch.zeros(1, dtype=dtype))
    opt = torch.optim.SGD([p], lr=0.0)
    handle = attach(opt, AdaptiveClip(EMARatio(alpha=0.999), None, warmup=None, warmup_steps=1))
    for _ in range(100):
        p.grad = torch.ones_like(p)
        opt.step()
    for _ in range(400):
        p.grad = torch.full_like(p, 2.0)
        opt.step()
    mean = handle.state[p]["AdaptiveClip/mean"]
    assert mean.dtype == torch.float32
    assert mean.item() == pytest.approx(2 - 0.999**400, rel=1e-3)  # in bfloat16 it stalls at 1


# ---------------------------------------------------------------------- steps inside of autocast


def attached_sgd(params: list[Parameter]) -> Any:
    opt = torch.optim.SGD(params, lr=0.1)
    attach(opt, Orthogonalize())
    return opt


INSIDE: dict[str, Callable[[list[Parameter]], Any]] = {
    "default": lambda params: Modular(params, Orthogonalize(), LR(0.1)),
    "compile": lambda params: Modular(params, Orthogonalize(), LR(0.1), compile=True),
    "attach": attached_sgd,
    "release": lambda params: release(params, Orthogonalize(), LR(0.1)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_step_inside_of_autocast_is_computed_in_float32(name):
    """Without care, autocast rounds the factors of matrix products."""
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    ends = []
    for inside in (False, True):
        p = Parameter(start.clone())
        opt = INSIDE[name]([p])
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                (p * start).sum().backward()
                opt.step()
                assert torch.is_autocast_enabled("cpu") == inside
            opt.zero_grad()
        ends.append(p.detach())
    assert not ends[0].equal(start)
    same(ends[0], ends[1])


# ---------------------------------------------------------------------- gradients of another dtype


def give(p: Parameter, grad: Tensor) -> None:
    """Set a gradient of any dtype; torch asks to be told where it is not the parameter's."""
    if hasattr(p, "grad_dtype"):
        p.grad_dtype = grad.dtype
        p.grad = grad
    else:  # older torch
        p.grad = torch.zeros_like(p)
        p.grad.data = grad


LINKS: dict[str, Callable[[], list[Any]]] = {
    "LR": lambda: [LR(0.01)],
    "ClipNorm": lambda: [ClipNorm(0.5, dim="global"), LR(0.01)],
    "grad": lambda: [ClipNorm(0.5, target="grad"), LR(0.01)],
    "AdamW": lambda: [ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), LR(0.01)],
    "ZClip": lambda: [ZClip(warmup_steps=2), Adam(), LR(0.01)],
    "Accumulate": lambda: [Accumulate(2), LR(0.01)],
}
DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]


@at_once("rounding", ["nearest", "kahan"])
@pytest.mark.parametrize("links", LINKS)
@at_once("own, other", DTYPES)
def test_gradients_may_have_another_dtype_than_their_parameters(own, other, links, rounding):
    """The step is that of the same gradient in the dtype that state is kept in."""
    torch.manual_seed(0)
    wide = torch.float64 if own == torch.float64 else torch.float32
    start = torch.randn(6, 5)
    params = [Parameter(start.to(own, copy=True)) for _ in range(2)]
    opts = [Modular([p], *LINKS[links](), rounding=rounding) for p in params]
    for i in range(6):
        grad = torch.randn(6, 5, generator=torch.Generator().manual_seed(i)).to(other)
        give(params[0], grad.clone())
        give(params[1], grad.to(wide))
        for opt in opts:
            opt.step()
        assert params[0].grad.dtype == other
    ulp = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(
        own, 1e-3 if links == "grad" else 1e-6
    )
    torch.testing.assert_close(params[0], params[1], rtol=2 * ulp, atol=ulp / 10)


def test_gradients_of_float32_reach_bfloat16_parameters_unrounded():
    p = Parameter(torch.ones(1, dtype=torch.bfloat16))
    opt = Modular([p], Adam(), LR(1e-3))
    give(p, torch.tensor([1 + 2.0**-12]))
    opt.step()
    assert opt.state[p]["Adam/exp_avg"].item() == pytest.approx(0.1 * (1 + 2.0**-12), rel=1e-6)


@pytest.mark.parametrize("name", ["AdamW single", "SGD fused"])
def test_attached_rules_keep_the_dtype_of_gradients(name):
    p = Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = ATTACHED[name]([p])
    give(p, torch.full((4,), 3.0))
    handle = attach(opt, ClipNorm(1.0))
    handle.step()
    assert p.grad.dtype == torch.float32
    assert p.grad.norm().item() == pytest.approx(1.0, rel=1e-6)


# ---------------------------------------------------------------------- pure bfloat16


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_scaling_changes_no_step_of_bfloat16_parameters(rounding):
    runs = []
    for scale in (scaler(), None):
        model = network().bfloat16()
        opt = Modular(
            model.parameters(), ClipNorm(0.5, dim="global"), Adam(), LR(1e-3), rounding=rounding
        )
        for i in range(8):
            x = batch(i).bfloat16()
            step(model, opt, x, scale, spoil=inf if scale and i in (2, 5) else None)
            if scale and i in (2, 5):  # the step that was skipped, and then as it is
                step(model, opt, x, scale)
        runs.append((model, opt))
    same(runs[0][0].state_dict(), runs[1][0].state_dict())
    assert equal(memory(runs[0][1], runs[0][1]), memory(runs[1][1], runs[1][1]))


def test_accumulated_batches_are_one_batch_of_bfloat16_parameters():
    runs = []
    for parts in (1, 4):
        model = network().bfloat16()
        opt = Modular(model.parameters(), Adam(), LR(1e-3), rounding="kahan")
        for i in range(5):
            opt.zero_grad()
            for x in batch(i).bfloat16().chunk(parts):
                (model(x).float().square().mean() / parts).backward()
            opt.step()
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=4e-3)  # gradients are sums of bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_autocast_and_scaler_on_a_cuda_device(rounding):
    for dtype in (torch.float16, torch.bfloat16):
        model, scale = network().cuda(), torch.amp.GradScaler("cuda", init_scale=SCALE)
        if dtype == torch.bfloat16:
            model.bfloat16()
        opt = Modular(
            model.parameters(), ClipNorm(0.5, dim="global"), Adam(), LR(1e-2), rounding=rounding
        )
        losses = []
        for i in range(60):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=dtype):
                loss = model(batch(i).cuda()).float().square().mean()
            scale.scale(loss).backward()
            scale.step(opt)
            scale.update()
            losses.append(loss.item())
        assert sum(losses[-9:]) < sum(losses[:9]) / 2


MECHANISMS = {
    "ClipValue",
    "ClipNorm",
    "ClipNormGrowth",
    "AutoClip",
    "Adam",
    "Prodigy",
    "Accumulate",
    "SkipSpike",
    "Partition",
    "Orthogonalize",
    "InBasis",
    "ScheduleFree",
}
assert {row.cls.__name__ for row in ROWS} >= MECHANISMS


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if name in MECHANISMS else pytest.mark.slow)
        for name, row in ((row.cls.__name__, row) for row in ROWS)
    ],
)
def test_every_module_steps_under_a_grad_scaler(row):
    """It sees gradients without the scale, and nothing of a step that overflowed."""
    make = next(iter(row.good.values()))
    models, opts = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.Linear(4, 3, bias=False))
        opts.append(Modular(models[-1].named_parameters(), *with_lr(make(), 1e-2)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    for step in range(5):
        overflow = step == 2
        for model, opt in zip(models, opts, strict=True):
            opt.zero_grad()
            torch.manual_seed(step)
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(8, 4)).float().square().mean()
            scaler.scale(loss * (inf if overflow else 1.0)).backward()
        if not overflow:
            models[1].weight.grad.mul_(1 / scaler.get_scale())
            opts[1].step()
        scaler.step(opts[0])
        scaler.update()
        assert torch.equal(models[0].weight, models[1].weight)
