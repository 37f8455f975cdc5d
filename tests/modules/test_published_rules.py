"""The numbers of rules from papers, worked out by hand, and their edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.helpers import about, close, same
from torchzero_clip import (
    EMA,
    LR,
    ACClip,
    Accumulate,
    AdaClip,
    AdaGN,
    Adam,
    AdaptiveClip,
    AdEMAMix,
    Carry,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Clipper,
    Clippy,
    ClipValue,
    DeltaClip,
    GeometricQuantile,
    Graft,
    Hyperball,
    Identity,
    Mars,
    Masked,
    MaxNorm,
    Modular,
    Momentum,
    Noise,
    Parallel,
    Project,
    Quantile,
    Reset,
    Scale,
    Sign,
    SpikeClip,
    StableAdam,
    TrustRatio,
    WeightDecay,
    When,
    ZClip,
)

inf, nan = math.inf, math.nan


def outputs(rule: Any, *gradients: Any, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What a chain makes of each gradient of one parameter at zero."""
    grads = [torch.as_tensor(g, dtype=dtype) for g in gradients]
    p = Parameter(torch.zeros_like(grads[0]))
    links, out = rule if isinstance(rule, tuple) else (rule,), []
    clipper = Clipper([p], *links)
    for g in grads:
        p.grad = g.clone()
        clipper.step()
        out.append(p.grad)
    return out


def values(rule: Any, *gradients: float, dtype: torch.dtype = torch.float64) -> list[float]:
    """What a chain makes of a parameter of one number, step by step."""
    return [out.item() for out in outputs(rule, *[[g] for g in gradients], dtype=dtype)]


# ---------------------------------------------------------------------- StableAdam


def test_stable_adam_divides_by_the_growth_of_the_gradient_over_its_average() -> None:
    first, second = outputs(StableAdam(), [1.0, 1.0], [3.0, 4.0])
    assert first.tolist() == about([1 / (1 + 1e-6)] * 2)
    assert second.tolist() == about([0.676587, 0.651841], abs=1e-6)


def test_stable_adam_shows_its_r_among_the_metrics() -> None:
    p = Parameter(torch.zeros(2, dtype=torch.float64))
    clipper = Clipper([p], StableAdam())
    for gradient in ([1.0, 1.0], [3.0, 4.0]):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        clipper.step()
    assert clipper.metrics()["StableAdam/norm"].item() == about(1.354038)


def test_stable_adam_shortens_a_step_after_a_jump_far_more_than_clipping_adams_update() -> None:
    assert values(StableAdam(eps=1e-12), *[1.0] * 100, 10.0)[-1] == about(0.190002, abs=1e-6)


def test_stable_adam_is_adam_where_gradients_shrink() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(3).sign() / t for t in range(1, 20)]
    for ours, adams in zip(
        outputs(StableAdam((0.9, 0.99), 1e-8), *grads),
        outputs(Adam((0.9, 0.99), 1e-8), *grads),
        strict=True,
    ):
        close(ours, adams, rtol=1e-12)


def test_the_decay_of_stable_adam_is_shortened_with_the_step_and_weight_decay_is_not() -> None:
    p, q = (Parameter(torch.tensor([2.0], dtype=torch.float64)) for _ in range(2))
    ours = Modular([p], StableAdam(weight_decay=0.1), LR(1.0))
    other = Modular([q], StableAdam(), WeightDecay(0.1), LR(1.0))
    for g in (1.0, 1.0, 10.0):
        before, p.grad = p.item(), torch.full_like(p, g)
        q.data.fill_(before)
        q.grad = p.grad.clone()
        ours.step()
        other.step()
    r = ours.metrics()["StableAdam/norm"].item()
    assert r > 1.5
    assert q.item() - p.item() == about(0.1 * before * (1 / r - 1))


def test_a_growth_in_one_tensor_shortens_that_tensor_alone() -> None:
    p, q = (Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    clipper = Clipper([p, q], StableAdam())
    for g in (1.0, 1.0, 50.0):
        p.grad, q.grad = torch.full_like(p, g), torch.ones_like(q)
        clipper.step()
    assert clipper.metrics()["StableAdam/clipped"].tolist() == [True, False]


# ---------------------------------------------------------------------- AdaGN


def test_ada_gn_makes_norms_that_do_not_change_one_and_a_change_less() -> None:
    assert values(AdaGN(), 1.0, 1.0, 10.0, 1.0, 1.0) == about(
        [1.0, 1.0, 0.834044, 0.672244, 0.570957], abs=1e-6
    )


def test_ada_gn_makes_a_constant_norm_one_from_the_first_step() -> None:
    assert values(AdaGN(), *[5.0] * 6) == about([1.0] * 6)
    assert values(AdaGN(), *[-5.0] * 3) == about([-1.0] * 3)


def test_ada_gn_without_memory_forgets_a_spike_at_once() -> None:
    assert values(AdaGN((0.0, 0.0)), 1.0, 1e9, 1.0) == about([1.0] * 3)


def test_ada_gn_with_eps_takes_in_that_the_gradient_is_small() -> None:
    assert values(AdaGN(eps=1.0), 1.0, 1.0) == about([0.5, 0.5])


def test_ada_gn_has_norm_one_before_any_finite_norm_was_seen() -> None:
    first, second = outputs(AdaGN(), [inf, 2.0], [3.0, 4.0])
    assert first[0].isnan()
    assert first[1] == 0
    assert second.tolist() == about([0.6, 0.8])


# ---------------------------------------------------------------------- AdaClip


def test_ada_clip_scales_what_is_above_the_average_largest_entry() -> None:
    first, second = outputs(AdaClip(), [1.0, -2.0], [1.0, -20.0])
    assert first.tolist() == [1.0, -2.0]
    assert second.tolist() == about([1.0, -2.0])


def test_ada_clip_counts_the_present_where_it_is_told_to() -> None:
    _, second = outputs(AdaClip(past_only=False), [1.0, -2.0], [1.0, -20.0])
    assert second.tolist() == about([1.0, -11.004502])


def test_ada_clip_keeps_the_proportions_of_what_it_cuts() -> None:
    _, second = outputs(AdaClip(), [2.0, 0.0, 0.0], [1.0, -10.0, 40.0])
    assert second.tolist() == about([1.0, -0.5, 2.0])


def test_ada_clip_averages_what_came_and_not_what_it_let_through() -> None:
    outs = values(AdaClip(0.5), 1.0, 9.0, 9.0, 9.0)
    means = [1.0, (0.25 * 1 + 0.5 * 9) / 0.75, (0.125 * 1 + 0.75 * 9) / 0.875]
    assert outs == about([1.0, *means])


def test_zero_gradients_set_no_bound_for_ada_clip_and_lower_none() -> None:
    assert values(AdaClip(0.5), 0.0, 0.0, 3.0, 0.0, 3.0) == about([0.0, 0.0, 3.0, 0.0, 3.0])


# ---------------------------------------------------------------------- TrustRatio


def factor(weight: float, update: float, **arguments: Any) -> float:
    """What TrustRatio multiplies an update of this norm by, for a weight of that norm."""
    p = Parameter(torch.tensor([0.6, -0.8], dtype=torch.float64) * weight)
    p.grad = torch.tensor([0.8, 0.6], dtype=torch.float64) * update
    Clipper([p], TrustRatio(**arguments)).step()
    return (p.grad.norm() / update).item()


@pytest.mark.parametrize(
    ("weight", "arguments", "expected"),
    [
        (3.0, {}, 6.0),
        (3.0, {"bounds": (0.0, 1.0)}, 1.0),  # LAMBC
        (0.1, {"bounds": (0.0, 1.0)}, 0.2),
        (3.0, {"coefficient": 0.01, "bounds": (1.0, inf)}, 1.0),  # a floor of the step
        (300.0, {"coefficient": 0.01, "bounds": (1.0, inf)}, 6.0),
        (0.1, {"bounds": (0.5, 2.0)}, 0.5),
        (30.0, {"bounds": (0.5, 2.0)}, 2.0),
        (0.0, {"bounds": (0.5, 0.7)}, 1.0),
        (3.0, {"coefficient": 0.0}, 0.0),
        (3.0, {"bounds": (0.0, 0.0)}, 0.0),
    ],
)
def test_bounds_hold_the_factor_of_trust_ratio(
    weight: float, arguments: dict[str, Any], expected: float
) -> None:
    assert factor(weight, 0.5, **arguments) == about(expected)


def test_a_checkpoint_from_before_bounds_loads_without_a_warning() -> None:
    p = Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    opt = Modular([p], TrustRatio(), Adam(), LR(0.1))
    opt.step()
    old = opt.state_dict()
    for group in old["param_groups"]:
        del group["bounds"]
    other = Modular([p], TrustRatio(bounds=(0.0, 2.0)), Adam(), LR(0.1))
    other.load_state_dict(old)
    assert other.param_groups[0]["bounds"] == (0.0, 2.0)


# ---------------------------------------------------------------------- SpikeClip


def test_spike_clip_observes_what_it_lets_pass_while_it_waits() -> None:
    rule = SpikeClip(4.0, 0.5, wait=3)
    assert values(rule, 1.0, 100.0, 300.0, 100.0) == about(
        [1.0, 100.0, 2 * math.sqrt(0.25 + 5000), 100.0]
    )


def test_spike_clip_waits_again_in_every_so_many_steps_from_zero_on() -> None:
    """A step that is cut is at most √2 times the one before, and each here is three times it."""
    rising = [3.0**t for t in range(12)]
    out = values(SpikeClip(2.0, 0.0, wait=2, every=5), *rising)
    cut = [t for t, (u, given) in enumerate(zip(out, rising, strict=True), 1) if u < given]
    assert cut == [2, 3, 4, 7, 8, 9, 12]


# ---------------------------------------------------------------------- Reset


def test_reset_begins_small_and_grows_along_a_cosine() -> None:
    out = values(Reset(Identity(), 200, warmup=150), *[1.0] * 400)
    assert out[:199] == [1.0] * 199
    assert [out[200 + k - 1] for k in (0, 75)] == about([0.01, 0.49985], abs=1e-6)
    assert out[349:399] == [1.0] * 50
    assert out[399] == about(0.01)


def test_adam_with_a_kept_count_steps_too_far_after_a_reset() -> None:
    """The numbers of its page: of steady gradients, at the first reset of SPAM."""
    steady = [1.0] * 501
    first = values(Reset(Adam(eps=0.0), 500, keep=("step",)), *steady)[-2:]
    assert first == about([1.984, 2.668], abs=1e-3)


INSIDE = {
    "Adam": Adam,
    "growth": lambda: ClipNormGrowth(dim="layer"),
    "global": lambda: ZClip(warmup_steps=2),
    "window": lambda: AdaptiveClip(Quantile(0.5, 4), dim="group", warmup_steps=0),
    "counts": lambda: When(lambda step: step == 2, Scale(0.5)),
    "sum": lambda: Accumulate(2),
    "noise": lambda: Noise(0.1),
    "nested": lambda: Masked(Chain(Momentum(), ClipNormByEMA()), lambda name, p: True),
}


@pytest.mark.parametrize("inside", INSIDE)
def test_what_reset_begins_anew_is_as_new(inside: str) -> None:
    links = INSIDE[inside]
    p, q = (
        Parameter(torch.full((3,), 2.0, dtype=torch.float64)),
        Parameter(torch.full((3,), 2.0, dtype=torch.float64)),
    )
    old = Modular([("a.p", p)], Reset(links(), 5), LR(0.1))
    place = Masked(links(), lambda name, p: True, name="Reset")  # the path, which seeds Noise
    new = Modular([("a.p", q)], place, LR(0.1))
    for t in range(1, 10):
        p.grad = torch.linspace(-1, 2, 3, dtype=torch.float64) * t
        if t == 5:
            q.data.copy_(p.data)
        old.step()
        if t >= 5:
            q.grad = p.grad.clone()
            new.step()
            same(p, q)


def test_reset_reaches_parameters_without_a_gradient_and_its_checkpoint_loads() -> None:
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    opt = Modular([p, q], Reset(Adam(), 3), LR(0.1))
    for t in range(1, 4):
        p.grad = torch.ones(2)
        q.grad = torch.ones(2) if t < 3 else None
        opt.step()
    assert not opt.state[q]["Reset/Adam/exp_avg"].any()
    assert opt.state[q]["Reset/Adam/step"] == 0
    assert opt.state[p]["Reset/Adam/step"] == 1
    opt.load_state_dict(opt.state_dict())


def test_reset_keeps_what_it_is_told_to() -> None:
    p = Parameter(torch.ones(2))
    opt = Modular([p], Reset(Adam(), 3, keep=("step", "exp_avg_sq")), LR(0.1))
    for t in range(1, 4):
        p.grad = torch.ones(2) * t
        opt.step()
    state = opt.state[p]
    assert state["Reset/Adam/step"] == 3
    assert state["Reset/Adam/exp_avg"].tolist() == about([0.3] * 2)
    assert state["Reset/Adam/exp_avg_sq"].tolist() == about([0.001 * (1 + 4 + 9)] * 2, rel=1e-2)


# ---------------------------------------------------------------------- Mars


def test_mars_adds_its_share_of_the_change_since_the_last_gradient() -> None:
    assert values(Mars(0.5, 0.1), 1.0, 3.0, 3.0, 0.0) == about([1.1, 3.2, 3.0, -0.3])
    assert values(Mars(), 1.0)[0] == about(1 + 0.025 * 0.95 / 0.05)


def test_mars_remembers_the_gradient_and_not_what_it_made_of_it() -> None:
    p = Parameter(torch.zeros(1))
    clipper = Clipper([p], Mars(0.5, 1.0, target="grad"))
    for g, expected in ((1.0, 2.0), (2.0, 3.0), (2.0, 2.0)):
        p.grad = torch.tensor([g])
        clipper.step()
        assert p.grad.item() == expected


# ---------------------------------------------------------------------- AdEMAMix


def mixed(gradients: list[float], beta3: Any, alpha: Any) -> list[float]:
    """AdEMAMix in plain numbers; β₃ and α are functions of the step."""
    m = s = v = 0.0
    out = []
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        s = beta3(t) * s + (1 - beta3(t)) * g
        out.append((m / (1 - 0.9**t) + alpha(t) * s) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8))
    return out


def test_ademamix_adds_a_slow_average_that_begins_at_zero() -> None:
    gradients = [1.0, -2.0, 3.0, 0.5]
    expected = mixed(gradients, lambda t: 0.9999, lambda t: 2.0)
    assert values(AdEMAMix(), *gradients) == about(expected, rel=1e-12)


def test_ademamix_warms_alpha_up_in_a_line_and_beta3_by_its_half_life() -> None:
    def half_life(beta: float) -> float:
        return math.log(0.5) / math.log(beta + 1e-8)

    def beta3(t: int) -> float:
        a = t / 4
        middle = (1 - a) * half_life(0.9) + a * half_life(0.99)
        return 0.5 ** (1 / middle) if t < 4 else 0.99

    gradients = [1.0, -2.0, 3.0, 0.5, 1.0, 1.0]
    rule = AdEMAMix((0.9, 0.999, 0.99), 5.0, alpha_warmup=5, beta3_warmup=4)
    expected = mixed(gradients, beta3, lambda t: 5.0 * min(t / 5, 1))
    assert values(rule, *gradients) == about(expected, rel=1e-12)


def test_the_half_life_of_ademamix_is_in_the_middle_in_the_middle_of_its_warmup() -> None:
    p = Parameter(torch.zeros(1, dtype=torch.float64))
    clipper = Clipper([p], AdEMAMix((0.5 ** (1 / 10), 0.9, 0.5 ** (1 / 30)), beta3_warmup=2))
    p.grad = torch.ones_like(p)
    clipper.step()
    slow = clipper.state[p]["AdEMAMix/exp_avg_slow"].item()
    assert 1 - slow == about(0.5 ** (1 / 20))


# ---------------------------------------------------------------------- Carry


def test_carry_brings_back_what_was_cut_off() -> None:
    assert values(Carry(ClipValue(1.0)), 3.0, 0.0, 0.0, -0.5) == about([1.0, 1.0, 1.0, -0.5])


def test_over_time_carry_loses_nothing() -> None:
    torch.manual_seed(0)
    grads = list(torch.randn(50, 3, dtype=torch.float64) * 2)
    grads += [torch.zeros(3, dtype=torch.float64)] * 100
    out = outputs(Carry(ClipNorm(1.0)), *grads)
    assert max(u.norm() for u in out) <= 1 + 1e-12
    close(sum(out), sum(grads), rtol=1e-12, atol=1e-12)


def test_carry_is_its_rule_where_the_rule_cuts_nothing() -> None:
    grads = [torch.tensor([0.1, -0.2]), torch.tensor([-0.3, 0.7])]
    same(outputs(Carry(ClipNorm(1.0)), *grads), outputs(Identity(), *grads))


def test_what_is_not_finite_is_not_carried() -> None:
    out = values(Carry(ClipValue(1.0)), 3.0, inf, nan, 0.0, 0.0)
    assert out == about([1.0, 1.0, nan, 1.0, 1.0])


# ---------------------------------------------------------------------- Parallel, Graft


def test_every_branch_of_parallel_sees_the_update_as_it_came() -> None:
    branches = {"a": Chain(Scale(10.0), ClipValue(1.0)), "b": Identity(), "c": Scale(-2.0)}
    rule = Parallel(branches, lambda u: u["a"].add_(u["b"]).add_(u["c"]))
    assert values(rule, 3.0, -0.05) == about([1 + 3 - 6, -0.5 - 0.05 + 0.1])


def test_the_branches_of_parallel_have_their_own_memory_and_keys() -> None:
    rule = Parallel({"fast": EMA(0.5), "slow": EMA(0.75)}, lambda u: u["fast"].sub_(u["slow"]))
    assert values(rule, 1.0, 1.0) == about([0.25, 0.75 - 0.4375])
    opt = Modular([Parameter(torch.zeros(1))], rule, LR(0.1))
    assert opt.param_groups[0]["Parallel/slow/beta"] == 0.75


def test_a_merge_that_returns_something_else_is_told() -> None:
    with pytest.raises(
        TypeError,
        match="Parallel: the function that was passed as merge= must return a TensorList",
    ):
        values(Parallel({"a": Identity()}, lambda u: None), 1.0)


def test_graft_has_the_size_of_one_and_the_direction_of_the_other() -> None:
    (out,) = outputs(Graft(Identity(), Sign()), [3.0, -4.0])
    assert out.tolist() == about([5 / math.sqrt(2), -5 / math.sqrt(2)])


def test_graft_measures_at_its_scope() -> None:
    gradient = [[3.0, 4.0], [0.0, 2.0]]
    (rows,) = outputs(Graft(Identity(), Sign(), dim=1), gradient)
    assert rows.flatten().tolist() == about([5 / math.sqrt(2)] * 2 + [0.0, 2.0])
    p, q = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    p.grad, q.grad = torch.tensor(gradient)
    Clipper([p, q], Graft(Scale(2.0), Sign(), dim="global")).step()
    size = 2 * math.sqrt(29 / 3)
    assert [*p.grad.tolist(), *q.grad.tolist()] == about([size, size, 0.0, size])


def test_graft_moves_as_far_as_the_one_and_remembers_both() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(4, dtype=torch.float64) for _ in range(10)]
    sizes, directions = outputs(Adam(), *grads), outputs(Momentum(0.9), *grads)
    for out, n, d in zip(
        outputs(Graft(Adam(), Momentum(0.9)), *grads), sizes, directions, strict=True
    ):
        close(out, d * n.norm() / d.norm(), rtol=1e-12)


def test_graft_does_not_hide_a_size_that_is_infinite() -> None:
    grad = torch.tensor([1e300, 2.0], dtype=torch.float64)
    (out,) = outputs(Graft(Scale(1e300), Sign()), grad)
    assert out.isnan().all()


# ---------------------------------------------------------------------- links after LR


def stepped(weight: Any, gradient: Any, *links: Any, steps: int = 1) -> list[float]:
    """A weight after steps with one gradient."""
    p = Parameter(torch.tensor(weight, dtype=torch.float64))
    opt = Modular([("layer.weight", p)], *links)
    for _ in range(steps):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        opt.step()
    return p.flatten().tolist()


def test_a_link_after_lr_sees_the_step_and_where_it_leads() -> None:
    seen = []

    def note(w: Tensor) -> Tensor:
        seen.append(w.tolist())
        return w.clamp(min=0)

    assert stepped([1.0, 1.0], [1.0, 4.0], LR(0.5), Project(note)) == [0.5, 0.0]
    assert seen == [[0.5, -1.0]]


def test_what_project_leaves_as_it_is_keeps_its_step_to_the_bit() -> None:
    torch.manual_seed(0)
    p, q = Parameter(torch.randn(50)), Parameter(torch.empty(50))
    q.data.copy_(p.data)
    ours = Modular([p], LR(0.1), Project(lambda w: w.clamp_(min=-0.5)))
    plain = Modular([q], LR(0.1))
    p.grad, q.grad = torch.ones(50), torch.ones(50)
    ours.step()
    plain.step()
    inside = q > -0.5
    assert p[inside].equal(q[inside])
    assert p[~inside].tolist() == about([-0.5] * int((~inside).sum()))


def test_max_norm_puts_the_weights_back_into_their_ball() -> None:
    assert stepped([3.0, 4.0], [0.0, 0.0], LR(0.1), MaxNorm(1.0)) == about([0.6, 0.8])
    assert stepped([3.0, 4.0], [-30.0, -40.0], LR(0.1), MaxNorm(10.0)) == about([6.0, 8.0])
    assert stepped([3.0, 4.0], [-30.0, -40.0], LR(0.1), MaxNorm(11.0)) == [6.0, 8.0]


def test_max_norm_holds_every_row_by_itself() -> None:
    after = stepped(
        [[3.0, 4.0], [0.3, 0.4]], [[0.0, 0.0], [0.0, 1.0]], LR(0.1), MaxNorm(1.0, dim=1)
    )
    assert after == about([0.6, 0.8, 0.3, 0.3])


def test_max_norm_uses_the_limit_of_each_group() -> None:
    p, q = (Parameter(torch.tensor([3.0, 4.0])) for _ in range(2))
    groups = [{"params": [p]}, {"params": [q], "max_norm": 2.0}]
    opt = Modular(groups, LR(0.1), MaxNorm(1.0))
    p.grad, q.grad = torch.zeros(2), torch.zeros(2)
    opt.step()
    assert (p.norm().item(), q.norm().item()) == (about(1.0), about(2.0))


def test_hyperball_turns_the_weights_and_keeps_their_norm() -> None:
    after = stepped([3.0, 4.0], [1.0, 0.0], TrustRatio(1.0), LR(0.1), Hyperball())
    assert after == about([2.649995, 4.239992], abs=1e-6)
    after = stepped([3.0, 4.0], [1.0, 0.3], Adam(), TrustRatio(1.0), LR(0.1), Hyperball(), steps=50)
    assert math.hypot(*after) == about(5.0)


@pytest.mark.parametrize("size", [0.1, 1.0])
def test_hyperball_moves_back_to_its_first_norm_whatever_happens_outside(size: float) -> None:
    begins = torch.tensor([3.0, 4.0]) * size
    p = Parameter(begins.clone())
    opt = Modular([p], LR(0.1), Hyperball())
    p.grad = torch.zeros(2)
    p.data[0] = nan  # which is no norm to keep
    opt.step()
    for factor in (1, 3):
        p.data.copy_(begins * factor)
        opt.step()
        assert p.tolist() == about(begins.tolist())


def test_a_weight_of_zero_moves_freely_until_it_has_a_norm() -> None:
    p = Parameter(torch.zeros(2, dtype=torch.float64))
    opt = Modular([p], LR(1.0), Hyperball())
    for gradient in ([-3.0, -4.0], [0.0, -4.0], [nan, 0.0]):
        p.grad = torch.tensor(gradient, dtype=torch.float64)
        opt.step()
        if gradient == [0.0, -4.0]:
            assert p.tolist() == about([3 * 5 / math.hypot(3, 8), 8 * 5 / math.hypot(3, 8)])
    assert opt.state[p]["Hyperball/radius"] == about(5.0)


# ---------------------------------------------------------------------- Clippy


def test_clippy_shortens_all_of_a_tensor_for_the_entry_that_goes_farthest() -> None:
    p = Parameter(torch.tensor([4.0, 0.0, -1.0], dtype=torch.float64))
    opt = Modular([p], LR(1.0), Clippy(0.1, 0.02))
    p.grad = torch.tensor([2.0, 0.01, 0.1], dtype=torch.float64)
    opt.step()
    assert p.tolist() == about([4 - 0.42, -0.0021, -1.021])
    assert opt.metrics()["Clippy/norm"].item() == about(2 / 0.42)


def test_a_step_that_changes_no_weight_by_more_than_its_share_passes_bit_for_bit() -> None:
    p = Parameter(torch.tensor([4.0, -2.0]))
    p.grad = torch.tensor([0.4, 0.1])
    grad = p.grad.clone()
    Clipper([p], Clippy(0.1, 0.0)).step()
    same(p.grad, grad)


def test_clippy_without_an_absolute_share_keeps_weights_at_zero_and_what_is_with_them() -> None:
    p = Parameter(torch.tensor([0.0, 3.0]))
    p.grad = torch.tensor([1e-3, 1e-3])
    Clipper([p], Clippy(absolute=0.0)).step()
    assert p.grad.tolist() == [0.0, 0.0]
    p.grad = torch.tensor([0.0, 0.1])
    Clipper([p], Clippy(absolute=0.0)).step()
    assert p.grad.tolist() == about([0.0, 0.1], abs=1e-7)


def test_clippy_holds_half_precision_to_the_same_share() -> None:
    p = Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    p.grad = torch.tensor([1.0, 1.0], dtype=torch.bfloat16)
    Clipper([p], Clippy(0.5, 0.0)).step()
    assert p.grad.tolist() == [0.5, 0.5]


# ---------------------------------------------------------------------- ACClip


def test_ac_clip_is_momentum_held_to_the_average_size_of_each_entry() -> None:
    m = tau = 0.0
    for g, out in zip(sizes := [1.0, -2.0, 100.0, 1.0], values(ACClip(), *sizes), strict=True):
        m, tau = 0.9 * m + 0.1 * g, 0.99 * tau + 0.01 * abs(g)
        assert out == about(m * min(1, tau / (abs(m) + 1e-5)))


def test_ac_clip_lets_steady_gradients_pass_as_momentum_would() -> None:
    rule = ACClip((0.9, 0.5), 1e-12)
    assert values(rule, *[3.0] * 200)[-1] == about(3.0, rel=1e-6)


def test_an_entry_that_is_nan_leaves_its_averages_and_the_others_alone() -> None:
    *_, last = outputs(ACClip(), [1.0, 1.0], [nan, 1.0], [inf, 1.0], [1.0, 1.0])
    twice = values(ACClip(), 1.0, 1.0)[-1]
    four = values(ACClip(), 1.0, 1.0, 1.0, 1.0)[-1]
    assert last.tolist() == about([twice, four])


# ---------------------------------------------------------------------- DeltaClip


def test_delta_clip_always_leaves_its_share() -> None:
    assert values(DeltaClip(1.0, 0.25), 0.5, 2.0, 4.0, 10.0) == about([0.5, 1.0, 1.0, 2.5])


def test_delta_clip_without_a_share_is_clip_norm_and_with_all_of_it_nothing() -> None:
    grads = [torch.randn(3, 2) * 10 for _ in range(4)]
    for a, b in zip(
        outputs(DeltaClip(1.0, 0.0), *grads), outputs(ClipNorm(1.0), *grads), strict=True
    ):
        same(a, b)
    for a, b in zip(outputs(DeltaClip(1.0, 1.0), *grads), grads, strict=True):
        same(a, b.double())


# ---------------------------------------------------------------------- GeometricQuantile


def test_a_geometric_quantile_moves_by_a_factor_up_or_down() -> None:
    rule = AdaptiveClip(GeometricQuantile(0.5, 0.2), warmup=None, warmup_steps=0)
    up = math.exp(0.1)
    expected = [2, 2, 2 * up, 2 * up**2, 2 * up**3, 2 * up**4, 0.1, 2 * up**4]
    assert values(rule, 2.0, 3.0, 4.0, 3.0, 10.0, 3.0, 0.1, 3.0) == about(expected)


def test_a_geometric_quantile_starts_at_the_mean_of_the_warm_up() -> None:
    rule = AdaptiveClip(GeometricQuantile(0.5, 0.2), warmup=None, warmup_steps=3)
    assert values(rule, 2.0, 3.0, 4.0, 10.0)[-1] == about(3.0)


@pytest.mark.parametrize("q", [0.2, 0.5, 0.9])
def test_a_geometric_quantile_settles_at_the_quantile(q: float) -> None:
    criterion = GeometricQuantile(q, 0.01)
    state = {"quantile": torch.full((1,), 5.0, dtype=torch.float64)}
    group, draw, after = {"q": q, "rate": 0.01}, torch.Generator().manual_seed(0), []
    for step in range(6000):
        norm = torch.rand(1, dtype=torch.float64, generator=draw)
        state = criterion.observe(norm, state, group)
        if step >= 2000:
            after.append(state["quantile"].item())
    assert sum(after) / len(after) == about(q, abs=0.03)
