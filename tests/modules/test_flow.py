"""Which parameters and which steps: masks, partitions, accumulation, noise."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.helpers import (
    Named,
    at_once,
    close,
    gradients,
    param,
    parameters,
    same,
    saved,
    set_grads,
    train,
)
from tests.modules.rows.flow import is_weight
from torchzero_clip import (
    EMA,
    LR,
    Accumulate,
    Adam,
    Cautious,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    Freeze,
    Identity,
    Lambda,
    Masked,
    Modular,
    Momentum,
    Noise,
    Orthogonalize,
    Partition,
    Scale,
    Transform,
    TrustRatio,
    WeightDecay,
    When,
    ZClip,
    matrices_and_rest,
)

SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (2, 3), "b.bias": (2,)}


def optimizer(params: Named, *links: Transform, compile: bool = False) -> Modular:
    return Modular(list(params.items()), *links, compile=compile)


def one_step(*links: Transform) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients and the update of one step."""
    params = parameters(SHAPES)
    before = {n: p.detach().clone() for n, p in params.items()}
    train(params, optimizer(params, *links), range(1))
    return gradients(SHAPES, 0), {n: before[n] - p.detach() for n, p in params.items()}


# ---------------------------------------------------------------------- Masked


def test_a_mask_lets_a_transform_act_on_what_it_chooses_only():
    grads, update = one_step(Masked(Scale(2.0), is_weight))
    for n, g in grads.items():
        torch.testing.assert_close(update[n], g * (2 if n.endswith("weight") else 1))


def test_a_mask_sees_the_parameter_and_an_empty_name_where_none_is_known():
    params, seen = parameters(SHAPES), []

    def where(name: str, p: Tensor) -> bool:
        seen.append((name, tuple(p.shape)))
        return p.dim() == 2

    opt = Modular(list(params.values()), Masked(Scale(0.0), where))
    before = {n: p.detach().clone() for n, p in params.items()}
    train(params, opt, range(1))
    assert all(name == "" and not name for name, _ in seen)
    assert {shape for _, shape in seen} == {*SHAPES.values()}
    assert [params[n].equal(before[n]) for n in params] == [True, False, True, False]


READERS = {
    "endswith": lambda name: name.endswith("weight"),
    "in": lambda name: "weight" in name,
    "==": lambda name: name == "a.weight",
    "a set": lambda name: name in {"a.weight"},
    "split": lambda name: name.split(".")[0] == "a",
    "first": lambda name: name[0] == "a",
}
CHOOSERS = {
    "Masked": lambda where: Masked(Scale(0.0), where),
    "Freeze": Freeze,
    "Partition": lambda where: Partition({True: Scale(0.0), False: Scale(1.0)}, where),
}


@at_once("reader, chooser", itertools.product(READERS, CHOOSERS))
def test_to_choose_by_name_what_has_none_is_an_error(reader, chooser):
    params, reads = parameters(SHAPES), READERS[reader]
    opt = Modular(params.values(), CHOOSERS[chooser](lambda name, p: reads(name)))
    set_grads(params, gradients(SHAPES, 0))
    with pytest.raises(ValueError, match=r"have no names: pass model\.named_parameters\(\)"):
        opt.step()


def test_global_inside_a_mask_means_what_the_mask_chooses():
    grads, update = one_step(Masked(ClipNorm(1.0, dim="global"), is_weight))
    total = math.hypot(*[grads[n].norm().item() for n in grads if n.endswith("weight")])
    for n, g in grads.items():
        torch.testing.assert_close(update[n], g / total if n.endswith("weight") else g)


def test_a_mask_keeps_state_for_what_it_chooses_only():
    params = parameters(SHAPES)
    opt = optimizer(params, Masked(Momentum(0.9), is_weight), LR(0.1))
    train(params, opt)
    assert {n for n, p in params.items() if opt.state.get(p)} == {"a.weight", "b.weight"}


def test_masking_everything_changes_nothing_to_the_last_bit():
    links = [ClipNormGrowth(mul=1.1, dim="global"), Adam(), WeightDecay(0.1)]
    plain, masked = parameters(SHAPES), parameters(SHAPES)
    train(plain, optimizer(plain, *links, LR(0.1)))
    train(masked, optimizer(masked, Masked(Chain(*links), lambda n, p: True), LR(0.1)))
    same(plain, masked)


def test_masking_nothing_is_the_identity():
    grads, update = one_step(Masked(Chain(Adam(), Scale(5.0)), lambda n, p: False))
    for n, g in grads.items():
        torch.testing.assert_close(update[n], g)


def test_a_mask_may_hold_an_end_of_the_step_for_its_own_part():
    params = parameters(SHAPES)
    before = {n: p.detach().clone() for n, p in params.items()}
    opt = optimizer(params, Masked(Accumulate(2), is_weight), LR(0.1))
    train(params, opt, range(1))
    for n, p in params.items():
        moved = before[n] - 0.1 * gradients(SHAPES, 0)[n]
        torch.testing.assert_close(p.detach(), before[n] if n.endswith("weight") else moved)


# ---------------------------------------------------------------------- Partition


def kind(name: str, p: Tensor) -> str:
    return "weight" if is_weight(name, p) else "other"


def test_a_partition_gives_each_label_its_transform():
    grads, update = one_step(Partition({"weight": Scale(2.0), "other": Scale(-3.0)}, kind))
    for n, g in grads.items():
        torch.testing.assert_close(update[n], g * (2 if n.endswith("weight") else -3))


def test_a_partition_is_an_optimizer_for_each_part():
    together, apart = parameters(SHAPES), parameters(SHAPES)
    branches = {"weight": Chain(ClipNorm(0.5, dim="global"), Momentum(0.9)), "other": Adam()}
    train(together, optimizer(together, Partition(branches, kind), LR(0.1)))
    for label, branch in branches.items():
        part = {n: p for n, p in apart.items() if kind(n, p) == label}
        train(part, optimizer(part, branch, LR(0.1)))
    close(together, apart)


def test_an_unknown_label_is_an_error_that_names_the_parameter_and_the_labels():
    params = parameters(SHAPES)
    opt = optimizer(params, Partition({"weight": Scale(1.0)}, kind))
    set_grads(params, gradients(SHAPES, 0))
    message = r"labels= must assign one of \['weight'\] .* got 'other' for parameter 'a.bias'"
    with pytest.raises(ValueError, match=message):
        opt.step()


def test_a_label_that_no_parameter_has_is_no_trouble():
    params, plain = parameters(SHAPES), parameters(SHAPES)
    branches = {"weight": Adam(), "other": Momentum(), "nobody": EMA()}
    opt = optimizer(params, Partition(branches, kind), LR(0.1))
    train(params, opt)
    del branches["nobody"]
    train(plain, optimizer(plain, Partition(branches, kind), LR(0.1)))
    same(params, plain)


def test_a_partition_may_hold_an_end_of_the_step_in_one_branch():
    params = parameters(SHAPES)
    before = {n: p.detach().clone() for n, p in params.items()}
    branches = {"weight": Accumulate(2), "other": Identity()}
    train(params, optimizer(params, Partition(branches, kind), LR(0.1)), range(1))
    for n, p in params.items():
        assert p.equal(before[n]) == n.endswith("weight"), n


# ---------------------------------------------------------------------- When


def test_a_condition_sees_the_number_of_the_step_from_one_on():
    params, seen = parameters(SHAPES), []
    train(params, optimizer(params, When(lambda step: bool(seen.append(step)), Scale(2.0))))
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_transform_acts_in_the_steps_where_the_condition_holds():
    params, scale = parameters(SHAPES), {}
    opt = optimizer(params, When(lambda step: step % 3 == 0, Scale(2.0)))
    for i in range(6):
        before = params["a.bias"].detach().clone()
        train(params, opt, range(i, i + 1))
        ratio = (before - params["a.bias"].detach()) / gradients(SHAPES, i)["a.bias"]
        scale[i + 1] = round(ratio.mean().item(), 3)
    assert scale == {1: 1, 2: 1, 3: 2, 4: 1, 5: 1, 6: 2}


def test_state_stands_still_while_the_condition_does_not_hold():
    params = parameters(SHAPES)
    opt = optimizer(params, When(lambda step: step % 2 == 0, Adam()), LR(0.1))
    train(params, opt)
    assert {m["When/Adam/step"].item() for m in opt.state.values()} == {3}


def test_the_number_of_the_step_is_saved():
    params, other = parameters(SHAPES), parameters(SHAPES)
    opt = optimizer(params, When(lambda step: step > 3, Scale(0.0)))
    train(params, opt, range(3))
    resumed = optimizer(other, When(lambda step: step > 3, Scale(0.0)))
    resumed.load_state_dict(saved(opt.state_dict()))
    before = other["a.bias"].detach().clone()
    train(other, resumed, range(3, 5))
    assert other["a.bias"].equal(before)


# ---------------------------------------------------------------------- Accumulate

TAILS = {
    "nothing": list,
    "clip": lambda: [ClipNorm(0.5, dim="global")],
    "adam": lambda: [ClipNorm(0.5), Adam(), WeightDecay(0.1)],
    "cautious": lambda: [Momentum(0.9), Cautious()],
    "growth": lambda: [ClipNormGrowth(mul=1.1), EMA(0.9)],
    "grad": lambda: [ClipNorm(0.5, target="grad"), Adam(), Cautious()],
    "trust": lambda: [Adam(), TrustRatio()],
    "zclip": lambda: [ZClip(warmup_steps=2, max_norm=None)],
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_small_batches_equal_the_mean_of_them_as_one(tail, k):
    small, large = parameters(SHAPES), parameters(SHAPES)
    opt = optimizer(small, Accumulate(k), *TAILS[tail](), LR(0.1))
    reference = optimizer(large, *TAILS[tail](), LR(0.1))
    for i in range(4):
        parts = [gradients(SHAPES, 10 * i + j) for j in range(k)]
        for part in parts:
            set_grads(small, part)
            opt.step()
        set_grads(large, {n: torch.stack([part[n] for part in parts]).mean(0) for n in large})
        reference.step()
        close(small, large)


def test_between_the_steps_nothing_moves_and_nothing_counts():
    params = parameters(SHAPES)
    opt = optimizer(params, Accumulate(3), Adam(), LR(0.1))
    before = {n: p.detach().clone() for n, p in params.items()}
    train(params, opt, range(2))
    same(params, before)
    assert all(
        set(memory) == {"Accumulate/sum", "Accumulate/begun"} for memory in opt.state.values()
    )
    train(params, opt, range(2, 3))
    assert not params["a.bias"].equal(before["a.bias"])
    assert {m["Adam/step"].item() for m in opt.state.values()} == {1}


def test_a_number_comes_back_as_a_number():
    params = parameters(SHAPES)
    opt = optimizer(params, Accumulate(3), Adam(), LR(0.1))
    train(params, opt, range(2))
    opt.load_state_dict(opt.state_dict())
    assert all(type(memory["Accumulate/begun"]) is int for memory in opt.state.values())


def test_a_missing_gradient_counts_as_zero():
    small, large = parameters(SHAPES), parameters(SHAPES)
    opt = optimizer(small, Accumulate(3), Adam(), LR(0.1))
    reference = optimizer(large, Adam(), LR(0.1))
    for i in range(3):
        parts: list[dict[str, Tensor | None]] = [
            dict(gradients(SHAPES, 10 * i + j)) for j in range(3)
        ]
        parts[0]["a.bias"] = parts[2]["b.weight"] = None
        parts[i]["b.bias"] = None
        total = {n: sum(p[n] for p in parts if p[n] is not None) / 3 for n in small}
        for part in parts:
            set_grads(small, part)
            opt.step()
        set_grads(large, total)
        reference.step()
        close(small, large)


def test_a_parameter_that_never_had_a_gradient_stays_untouched():
    params = parameters(SHAPES)
    opt = optimizer(params, Accumulate(2), WeightDecay(0.5), Adam(), LR(0.1))
    before = params["a.bias"].detach().clone()
    for i in range(4):
        set_grads(params, {**gradients(SHAPES, i), "a.bias": None})
        opt.step()
    assert params["a.bias"].equal(before)
    assert not opt.state.get(params["a.bias"])


def test_the_mean_is_what_later_links_read_as_the_gradient():
    """The second of two gradients alone would mask other entries than their mean."""
    params = parameters(SHAPES)
    opt = optimizer(params, Accumulate(2), Momentum(0.0), Cautious(), LR(1.0))
    before = {n: p.detach().clone() for n, p in params.items()}
    first, second = gradients(SHAPES, 0), {n: -0.5 * g for n, g in gradients(SHAPES, 0).items()}
    for part in (first, second):
        set_grads(params, part)
        opt.step()
    for n, p in params.items():
        torch.testing.assert_close(p.detach(), before[n] - 0.25 * first[n])


def test_gradients_are_only_read():
    params = parameters(SHAPES)
    opt = optimizer(params, Accumulate(2), ClipNorm(0.1), LR(0.1))
    for i in range(4):
        set_grads(params, gradients(SHAPES, i))
        opt.step()
        assert all(params[n].grad.equal(g) for n, g in gradients(SHAPES, i).items())


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_run_resumes_in_the_middle_of_a_window(after):
    straight, broken = parameters(SHAPES), parameters(SHAPES)
    train(straight, optimizer(straight, Accumulate(3), Adam(), LR(0.1)), range(9))
    opt = optimizer(broken, Accumulate(3), Adam(), LR(0.1))
    train(broken, opt, range(after))
    resumed = parameters(SHAPES)
    with torch.no_grad():
        for n, p in resumed.items():
            p.copy_(broken[n])
    other = optimizer(resumed, Accumulate(3), Adam(), LR(0.1))
    other.load_state_dict(saved(opt.state_dict()))
    train(resumed, other, range(after, 9))
    same(straight, resumed)


def test_half_precision_is_summed_in_single_precision():
    p = Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = Modular([p], Accumulate(512), LR(1.0))
    for i in range(512):
        p.grad = torch.ones_like(p)
        opt.step()
        if i == 400:
            assert opt.state[p]["Accumulate/sum"].item() == 401  # bfloat16 stalls at 256
    assert p.item() == -1


@pytest.mark.parametrize("compiled", [False, True])
def test_inside_a_mask_a_window_belongs_to_its_part(compiled):
    params, reference = parameters(SHAPES), parameters(SHAPES)
    inner = Chain(Accumulate(2), ClipNorm(0.5, dim="global"), Momentum(0.9))
    train(params, optimizer(params, Masked(inner, is_weight), LR(0.1), compile=compiled))
    weights = {n: p for n, p in reference.items() if n.endswith("weight")}
    others = {n: p for n, p in reference.items() if not n.endswith("weight")}
    train(weights, optimizer(weights, inner, LR(0.1)))
    train(others, optimizer(others, LR(0.1)))
    close(params, reference)


@pytest.mark.parametrize("compiled", [False, True])
def test_two_windows_in_two_branches_do_not_meet(compiled):
    params, reference = parameters(SHAPES), parameters(SHAPES)
    branches = {"weight": Chain(Accumulate(2), Adam()), "other": Chain(Accumulate(3), Momentum())}
    train(params, optimizer(params, Partition(branches, kind), LR(0.1), compile=compiled))
    for label, branch in branches.items():
        part = {n: p for n, p in reference.items() if kind(n, p) == label}
        train(part, optimizer(part, branch, LR(0.1)))
    close(params, reference)


def test_windows_multiply_when_they_follow_each_other():
    twice, once = parameters(SHAPES), parameters(SHAPES)
    train(twice, optimizer(twice, Accumulate(2), Accumulate(3), LR(0.1)), range(12))
    train(once, optimizer(once, Accumulate(6), LR(0.1)), range(12))
    close(twice, once)


# ---------------------------------------------------------------------- Freeze, Identity, Lambda


def test_frozen_parameters_stay_and_later_links_keep_nothing_for_them():
    params = parameters(SHAPES)
    before = {n: p.detach().clone() for n, p in params.items()}
    opt = optimizer(params, Freeze(lambda n, p: n == "a.bias"), Adam(), WeightDecay(0.1), LR(0.1))
    train(params, opt)
    assert [n for n in params if params[n].equal(before[n])] == ["a.bias"]
    assert not opt.state.get(params["a.bias"])


def test_frozen_parameters_do_not_count_in_a_norm_after_them():
    params, others = parameters(SHAPES), parameters(SHAPES)
    del others["a.bias"]
    freeze = Freeze(lambda n, p: n == "a.bias")
    train(params, optimizer(params, freeze, ClipNorm(0.1, dim="global"), LR(0.1)))
    train(others, optimizer(others, ClipNorm(0.1, dim="global"), LR(0.1)))
    close(others, {n: params[n] for n in others})


def test_freezing_everything_ends_the_step():
    params = parameters(SHAPES)
    opt = optimizer(params, Freeze(lambda n, p: True), Adam(), LR(0.1))
    before = {n: p.detach().clone() for n, p in params.items()}
    train(params, opt)
    same(params, before)
    assert not any(opt.state.values())


def test_identity_is_no_link_at_all():
    with_it, without = parameters(SHAPES), parameters(SHAPES)
    train(with_it, optimizer(with_it, Identity(), Adam(), Identity(), LR(0.1)))
    train(without, optimizer(without, Adam(), LR(0.1)))
    same(with_it, without)


def test_a_function_is_applied_to_each_tensor():
    shapes: list[tuple[int, ...]] = []

    def flip(u: Tensor) -> Tensor:
        shapes.append(tuple(u.shape))
        return -u.flip(0)

    grads, update = one_step(Lambda(flip))
    assert shapes == list(SHAPES.values())
    for n, g in grads.items():
        torch.testing.assert_close(update[n], -g.flip(0))


def test_a_function_may_write_what_it_is_given_without_writing_the_gradient():
    params = parameters(SHAPES)
    opt = optimizer(params, Lambda(lambda u: u.zero_()))
    set_grads(params, gradients(SHAPES, 0))
    opt.step()
    assert all(params[n].grad.equal(g) for n, g in gradients(SHAPES, 0).items())


# ---------------------------------------------------------------------- Noise


def noises(p: Parameter, opt: Modular, steps: int) -> Iterator[Tensor]:
    for _ in range(steps):
        p.data.zero_()
        p.grad = torch.zeros_like(p)
        opt.step()
        yield -p.detach().clone()


@pytest.mark.parametrize(("eta", "gamma"), [(1.0, 0.55), (0.01, 0.0), (4.0, 1.0)])
def test_the_variance_of_the_noise_falls_as_its_formula_says(eta, gamma):
    p = Parameter(torch.zeros(40_000))
    opt = Modular([p], Noise(eta, gamma))
    for t, noise in enumerate(noises(p, opt, 4)):
        variance = eta / (1 + t) ** gamma
        assert noise.var().item() == pytest.approx(variance, rel=0.03)
        assert abs(noise.mean().item()) < 4 * math.sqrt(variance / 40_000)


def test_noise_is_added_to_the_update_and_new_in_each_step_and_tensor():
    p, q = Parameter(torch.zeros(50)), Parameter(torch.zeros(50))
    opt, silent = Modular([p, q], Noise(1.0)), Modular([p, q], Noise(0.0))
    seen = []
    for _ in range(2):
        for x in (p, q):
            x.data.zero_()
            x.grad = torch.full_like(x, 3.0)
        opt.step()
        seen += [-p.detach() - 3, -q.detach() - 3]
    assert len({round(s[0].item(), 6) for s in seen}) == 4
    p.data.zero_()
    silent.step()
    assert p.eq(-3).all()


def test_noise_does_not_touch_the_generator_of_torch():
    p = Parameter(torch.zeros(5))
    before = torch.get_rng_state()
    list(noises(p, Modular([p], Noise(1.0)), 3))
    assert torch.get_rng_state().equal(before)


def test_the_seed_decides_the_noise():
    runs = []
    for seed in (0, 0, 1):
        p = Parameter(torch.zeros(5))
        runs.append(torch.stack(list(noises(p, Modular([p], Noise(1.0, seed=seed)), 3))))
    assert runs[0].equal(runs[1])
    assert not runs[0].equal(runs[2])


def test_a_resumed_run_draws_what_it_would_have_drawn():
    p, q = Parameter(torch.zeros(5)), Parameter(torch.zeros(5))
    opt, other = Modular([p], Noise(1.0)), Modular([q], Noise(1.0))
    list(noises(p, opt, 3))
    other.load_state_dict(saved(opt.state_dict()))
    for a, b in zip(noises(p, opt, 3), noises(q, other, 3), strict=True):
        assert a.equal(b)


def test_two_noises_in_a_chain_are_independent():
    """Twice the same numbers would have four times the variance of one."""
    p = Parameter(torch.zeros(40_000))
    (both,) = noises(p, Modular([p], Noise(1.0), Noise(1.0)), 1)
    assert both.var().item() == pytest.approx(2.0, rel=0.03)


# ---------------------------------------------------------------------- nesting

NESTED = Chain(
    Masked(
        Chain(ClipNorm(0.5, dim="global"), ClipNormGrowth(mul=1.2), ClipNorm(0.4, name="last")),
        is_weight,
    ),
    Partition({"weight": Chain(Momentum(0.8), EMA(0.5)), "other": Adam(betas=(0.5, 0.9))}, kind),
    When(lambda step: step > 2, Chain(EMA(0.9), Scale(0.5), name="late")),
    LR(0.1),
)


def test_hyperparameters_are_named_by_their_nesting():
    params = parameters(SHAPES)
    group = optimizer(params, NESTED).param_groups[0]
    assert group["Masked/ClipNorm/max_norm"] == 0.5
    assert group["Masked/last/max_norm"] == 0.4
    assert group["mul"] == 1.2
    assert group["momentum"] == 0.8
    assert group["Partition/weight/EMA/beta"] == 0.5
    assert group["When/late/EMA/beta"] == 0.9
    assert group["betas"] == (0.5, 0.9)


def test_state_is_named_by_its_nesting():
    params = parameters(SHAPES)
    opt = optimizer(params, NESTED)
    train(params, opt)
    assert set(opt.state[params["a.weight"]]) == {
        "Masked/ClipNormGrowth/previous",
        "Partition/weight/Momentum/momentum_buffer",
        "Partition/weight/Momentum/started",
        "Partition/weight/EMA/ema",
        "When/late/EMA/ema",
    }
    assert set(opt.state[params["a.bias"]]) == {
        "Partition/other/step",
        "Partition/other/exp_avg",
        "Partition/other/exp_avg_sq",
        "When/late/EMA/ema",
    }


def test_the_qualified_name_of_a_nested_value_is_accepted_and_live():
    params, plain = parameters(SHAPES), parameters(SHAPES)
    group = {"params": list(params.items()), "Partition/weight/EMA/beta": 0.0}
    opt = Modular([group], NESTED)
    other = optimizer(plain, NESTED)
    other.param_groups[0]["Partition/weight/EMA/beta"] = 0.0
    same(train(params, opt), train(plain, other))
    default = parameters(SHAPES)
    train(default, optimizer(default, NESTED))
    assert not default["a.weight"].equal(plain["a.weight"])


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_nested_chain_is_saved_and_loaded_to_the_last_bit(after):
    straight, first, second = parameters(SHAPES), parameters(SHAPES), parameters(SHAPES)
    train(straight, optimizer(straight, NESTED), range(8))
    opt = optimizer(first, NESTED)
    train(first, opt, range(after))
    with torch.no_grad():
        for n, p in second.items():
            p.copy_(first[n])
    other = optimizer(second, NESTED)
    other.load_state_dict(saved(opt.state_dict()))
    train(second, other, range(after, 8))
    same(straight, second)


def test_early_state_of_a_nested_chain_is_what_the_first_steps_make():
    params, other = parameters(SHAPES), parameters(SHAPES)
    early, lazy = optimizer(params, NESTED), optimizer(other, NESTED)
    set_grads(params, gradients(SHAPES, 0))
    early.init_state()
    same(train(params, early), train(other, lazy))
    for n in params:
        assert set(early.state[params[n]]) == set(lazy.state[other[n]]), n


# ---------------------------------------------------------------------- labels by name


def labelled(labels, *names):
    """The factor that each name gets, where "a" doubles and "b" triples."""
    params = [(name, param(0.0, grad=[1.0])) for name in names]
    Modular(params, Partition({"a": Scale(2.0), "b": Scale(3.0)}, labels), LR(1.0)).step()
    return [round(-p.item()) for _, p in params]


def test_labels_are_found_by_name_then_by_the_first_pattern_of_the_name():
    labels = {"head.*": "a", "*.weight": "b", "x.weight": "a", "*": "b"}
    assert labelled(labels, "head.weight", "x.weight", "y.weight", "z") == [2, 2, 3, 3]


def test_a_name_that_no_pattern_finds_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"matches the name 'tail' of a parameter.*: add a key"):
        labelled({"head": "a"}, "head", "tail")


def test_a_pattern_that_matches_no_name_is_an_error_with_the_nearest():
    for key in ("haed.*", "head.weight | haed.*"):
        words = (
            r"Partition: 'haed\.\*' in labels matches no parameter: the nearest is 'head.weight'"
        )
        with pytest.raises(ValueError, match=words):
            labelled({key: "a", "*": "b"}, "head.weight", "x.weight")


def test_a_table_with_every_name_may_have_more_names():
    assert labelled({"x": "a", "y": "b", "frozen": "a"}, "x", "y") == [2, 3]


def test_patterns_need_names():
    params = [param(0.0, grad=[1.0])]
    with pytest.raises(ValueError, match=r"pass model.named_parameters\(\) to the optimizer"):
        Modular(params, Partition({"a": Scale(2.0)}, {"x.*": "a"}), LR(1.0))


def test_labels_by_name_survive_a_config():
    chain = Chain(Partition({"a": Scale(2.0)}, {"*.weight": "a"}))
    again = Chain.from_config(json.loads(json.dumps(chain.to_config())))
    assert repr(again) == repr(chain)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)


class Language(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.tokens, self.places = nn.Embedding(30, 8), nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 30, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def matrices(model, **kwargs):
    return [name for name, kind in matrices_and_rest(model, **kwargs).items() if kind == "matrices"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_matrices_of_a_language_model_are_those_of_its_blocks(tied):
    """Also where the width is the number of places, so that a layer looks like a head."""
    model = Language(tied)
    expected = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "out")]
    assert matrices(model) == expected
    assert list(matrices_and_rest(model)) == [name for name, _ in model.named_parameters()]


def test_the_head_of_another_model_is_its_last_layer_or_the_one_that_is_named():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    assert matrices(model) == ["0.weight", "2.weight"]
    assert matrices(model, head="2") == ["0.weight", "3.weight"]
    with pytest.raises(ValueError, match=r"head must be .* got 'top'; the names are \['0', '1'"):
        matrices_and_rest(model, head="top")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got \["):
        matrices_and_rest([*model.parameters()])  # type: ignore[arg-type]


def test_a_head_of_one_output_is_a_head():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    assert matrices(model) == ["0.weight", "1.weight"]


def test_parameters_with_embed_in_their_name_are_the_rest():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
    model.mix = nn.Parameter(torch.zeros(5, 4))
    model.gain = nn.Parameter(torch.zeros(1, 1, 4))
    assert matrices(model) == ["mix", "0.weight"]


def test_what_only_looks_like_a_matrix_is_the_rest():
    """Filters of single channels, biases of experts, single rows, and factors of LoRA."""
    layers = {
        "depthwise": nn.Conv1d(8, 8, 4, groups=8),
        "two_filters": nn.Conv2d(8, 16, 3, groups=8),
        "transposed": nn.ConvTranspose1d(8, 8, 4, groups=8),
        "shared_expert_gate": nn.Linear(8, 1),
        "q_proj": nn.ModuleDict({"lora_A": nn.Linear(8, 2), "lora_B": nn.Linear(2, 8)}),
        "grouped": nn.Conv1d(8, 8, 4, groups=2),
        "first": nn.Conv1d(1, 8, 4),
        "router": nn.Linear(8, 3),
        "last": nn.Linear(8, 2),
    }
    model = nn.ModuleDict(layers)
    model.gate_up_proj_bias = nn.Parameter(torch.zeros(3, 8))
    assert matrices(model) == ["grouped.weight", "first.weight", "router.weight"]


def test_matrices_and_rest_are_two_optimizers_in_one():
    model = Language(tied=False)
    muon = Chain(Momentum(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw"))
    two = Partition({"matrices": muon, "rest": Adam()}, matrices_and_rest(model))
    opt = Modular(model.named_parameters(), two, WeightDecay(0.1), LR(1e-2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    for name, p in model.named_parameters():
        inside = {key.split("/")[1] for key in opt.state[p]}
        assert inside == ({"matrices"} if name in matrices(model) else {"rest"})
