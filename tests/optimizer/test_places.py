"""Links that do in their place what is seldom meant are named, and what nothing reads."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from tests.helpers import at_once, param
from torchzero_clip import (
    AGC,
    EMA,
    LR,
    Accumulate,
    Adam,
    AutoClip,
    Chain,
    ClipNorm,
    Clipper,
    ClipPercentile,
    ClipRMS,
    ClipValue,
    Freeze,
    InBasis,
    Kron,
    Lion,
    Masked,
    Modular,
    Momentum,
    NAdam,
    NanToNum,
    NeuronNorm,
    Normalize,
    Orthogonalize,
    Partition,
    Scale,
    ScaleByShape,
    Sign,
    SOAPBasis,
    Steepest,
    WeightDecay,
    attach,
)


def warned(*chain, make=Modular, params=None):
    """What making an optimizer with the chain warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make([param(1.0)] if params is None else params, *chain)
    return [str(warning.message) for warning in caught]


def head(opt):
    """The sentences in front of the plan."""
    return opt.explain().partition("\n\n")[0]


def explained(*chain):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return head(Modular(nn.Linear(8, 4).parameters(), *chain))


class TwiceNormalized(Normalize):
    """u ← 2 · u · norm_value / ‖u‖"""

    def limit(self, norm, state, group):
        return 2 * group["norm_value"]


@at_once(
    "chain, words",
    [
        (
            [Adam(), LR(0.1), WeightDecay(0.01)],
            "removes the fraction 0.01 of every weight: put Weigh",
        ),
        ([Chain(Lion(), LR(0.1)), WeightDecay(0.5)], "WeightDecay comes after LR, so"),
        ([Adam(), Scale(-1e-3)], "Scale(factor=-0.001) after Adam reverses the step: remove"),
        ([Adam(), LR(0.1), Scale(-1)], "Scale(factor=-1) after LR reverses the step: remove"),
        ([ClipNorm(0.0), LR(0.1)], "ClipNorm: with max_norm=0, every update becomes zero: to dis"),
        (
            [ClipValue(0), LR(0.1)],
            'zero: to disable clipping, remove ClipValue, or pass value=float("inf")',
        ),
        (
            [Adam(), Masked(LR(0.1), lambda n, p: True)],
            "no learning rate for parameters outside Masked, so",
        ),
        (
            [Momentum(), Adam(), LR(0.1)],
            "Adam after Momentum averages the gradient twice",
        ),
        ([EMA(0.9), Adam(), LR(0.1)], "Adam after EMA averages the gradient twice"),
        (
            [EMA(0.9), ClipNorm(1.0), Chain(NAdam()), LR(0.1)],
            "NAdam after EMA averages the gradient",
        ),
        ([EMA(0.9), InBasis(SOAPBasis(), Adam()), LR(0.1)], "InBasis/Adam after EMA averages"),
        (
            [Normalize(), ClipNorm(1.0), LR(0.1)],
            "ClipNorm with the limit 1 never clips: after Normalize,",
        ),
        (
            [Normalize(0.5), ClipNorm(1.0, dim=-1), LR(0.1)],
            "ClipNorm with the limit 1 never clips: after Normalize,",
        ),
        ([Normalize(dim="global"), ClipNorm(1.0), LR(0.1)], "norms are at most 1: remove ClipNorm"),
        (
            [Normalize(dim="global"), ClipValue(1.0), LR(0.1)],
            "ClipValue with the limit 1 never clips",
        ),
        ([Normalize(ord=1), ClipNorm(2.0), LR(0.1)], "ClipNorm with the limit 2 never clips"),
        ([Normalize(ord="rms"), ClipRMS(1.0), LR(0.1)], "root mean squares are at most 1"),
        (
            [Sign(), ClipRMS(1.0), LR(0.1)],
            "ClipRMS with the limit 1 never clips: after Sign, elements are at",
        ),
        ([Lion(), ClipValue(1.0), LR(0.1)], "ClipValue with the limit 1 never clips: after Lion,"),
        (
            [Normalize(), ClipNorm(5.0), ClipValue(0.1), LR(0.1)],
            "ClipNorm with the limit 5 never clips",
        ),
    ],
)
def test_what_is_hardly_ever_meant_warns_once_and_explain_says_it(chain, words):
    (message,) = warned(*chain)
    assert words in message
    sentence = re.split(": (put|add|remove|to disable) ", message)[0]
    assert sentence in explained(*chain)


@at_once(
    "chain",
    [
        [Adam(), WeightDecay(0.01), LR(0.1)],
        [Adam(), LR(0.1), WeightDecay(1e-5)],
        [Scale(-1), Adam(), LR(0.1)],
        [ClipNorm(1.0), Scale(-1), Momentum(), LR(0.1)],
        [ClipNorm(float("inf")), LR(0.1)],
        [Masked(Chain(Adam(), LR(0.1)), lambda n, p: True), Masked(Scale(0.1), lambda n, p: False)],
        [Adam(), Masked(WeightDecay(0.1), lambda n, p: True), LR(0.1)],
        [Adam(), LR(0.1), Accumulate(4)],
        [EMA(0.9), Adam((0.0, 0.99)), LR(0.1)],
        [Momentum(), Adam(momentum=False), LR(0.1)],
        [EMA(0.9), Sign(), LR(0.1)],
        [EMA(0.9), Orthogonalize(), LR(0.1)],
        [Normalize(), ClipNorm(0.5), LR(0.1)],
        [Normalize(), ClipNorm(1.0, dim="global"), LR(0.1)],
        [Normalize(), Scale(4.0), ClipNorm(1.0), LR(0.1)],
        [Normalize(ord="linf"), ClipNorm(1.0), LR(0.1)],
        [Normalize(ord="rms"), ClipRMS(1.0, dim=-1), LR(0.1)],
        [Normalize(ord="rms"), ClipNorm(1.0), LR(0.1)],
        [Normalize(min_size=4), ClipNorm(1.0), LR(0.1)],
        [Normalize(per_shape="sqrt_min"), ClipNorm(1.0), LR(0.1)],
        [Normalize(dim=0), ClipNorm(1.0, dim=-1), LR(0.1)],
        [Normalize(), Adam(), ClipNorm(1.0, dim="global"), LR(0.1)],
        [ClipNorm(1.0, dim="global"), ClipNorm(1.0), LR(0.1)],
        [Sign(), ClipNorm(1.0), LR(0.1)],
        [TwiceNormalized(), ClipNorm(1.0), LR(0.1)],
    ],
)
def test_what_may_be_meant_warns_of_nothing(chain):
    assert warned(*chain) == []


def test_a_limit_of_zero_warns_in_front_of_other_optimizers_as_well():
    assert len(warned(ClipNorm(0.0), make=Clipper)) == 1


@at_once(
    "chain, sentence",
    [
        ([Adam(), LR(0.1), ClipNorm(1.0)], "ClipNorm comes after LR, so ClipNorm limits the step"),
        ([LR(0.1), AGC()], "AGC comes after LR, so AGC limits the step instead of the gradient."),
        ([WeightDecay(0.1), Adam(), LR(0.1)], "WeightDecay before Adam is L2 regularization"),
        ([Adam(), LR(0.1), WeightDecay(1e-5)], "removes the fraction 1e-05 of every weight."),
        (
            [Adam(), Lion(), LR(0.1)],
            "Lion after Adam receives the updates of Adam, not the gradient.",
        ),
        (
            [Adam((0.999, 0.9)), LR(0.1)],
            "has betas=(0.999, 0.9), whose first value is larger than the second",
        ),
        ([Adam(), Accumulate(2), LR(0.1)], "Accumulate after Adam averages updates"),
        (
            [ClipNorm(1.0, dim="global"), Accumulate(2), LR(0.1)],
            "ClipNorm before Accumulate clips the gradients of parts of a batch, not their mean.",
        ),
        ([ClipValue(1.0), Accumulate(2), LR(0.1)], "ClipValue before Accumulate clips"),
        ([ClipNorm(1.0, dim=-1), LR(0.1)], "ClipNorm: dim=-1 uses one norm per slice; dim=None"),
        ([Momentum(), Adam(), LR(0.1)], "because the first beta of Adam is a momentum too."),
        (
            [EMA(0.9), Normalize(), Adam(), LR(0.1)],
            "Adam after EMA averages the gradient twice",
        ),
        (
            [ClipNorm(1.0, dim="global"), ClipNorm(1.0), LR(0.1)],
            "ClipNorm_2 with the limit 1 never clips: after ClipNorm, norms are at most 1.",
        ),
        ([AutoClip(percentile=0.9), LR(0.1)], "percentile=0.9 is less than one percent."),
    ],
)
def test_explain_says_what_a_link_does_where_it_stands(chain, sentence):
    assert sentence in explained(*chain)


@at_once(
    "chain",
    [
        [Accumulate(2), EMA(0.9), WeightDecay(0.1), LR(0.1)],
        [NanToNum(), Accumulate(2), ClipNorm(1.0, dim="global"), Adam(), LR(0.1)],
        [Momentum(), Sign(), LR(0.1)],
        [Adam(), WeightDecay(0.1), LR(0.1), Freeze(lambda n, p: "bias" in n)],
    ],
)
def test_explain_says_nothing_of_links_in_their_usual_place(chain):
    opt = Modular(nn.Linear(8, 4).named_parameters(), *chain)
    assert head(opt).startswith(repr(opt.chain)[len("Chain(") : -1])


def test_explain_names_a_mask_that_chooses_nothing():
    model = nn.Linear(8, 4)
    decay = Masked(WeightDecay(0.1), lambda name, p: "wieght" in name)
    text = head(Modular(model.named_parameters(), Adam(), decay, LR(0.1)))
    assert text == "Masked has no effect: where= selects no parameter."
    decay = Masked(WeightDecay(0.1), lambda name, p: "weight" in name)
    assert "none" not in head(Modular(model.named_parameters(), Adam(), decay, LR(0.1)))


@at_once(
    "rule",
    [
        lambda layout: Orthogonalize(layout=layout),
        lambda layout: Kron(layout=layout),
        lambda layout: InBasis(SOAPBasis(layout=layout), Adam()),
        lambda layout: Chain(Orthogonalize(layout=layout), NeuronNorm(layout=layout)),
    ],
)
def test_a_layout_of_a_name_that_no_parameter_has_is_an_error_with_the_nearest(rule):
    model = nn.ModuleDict({"qkv": nn.Linear(4, 6, bias=False)})
    named = list(model.named_parameters())
    assert warned(rule({"*qkv*": [3, 3]}), LR(0.1), params=named) == []
    words = r"'\*.qvk' in layout matches no parameter: the nearest is 'qkv.weight'"
    with pytest.raises(ValueError, match=words):
        Modular(named, rule({"*qkv*": [3, 3], "*.qvk": [3, 3]}), LR(0.1))
    words = r"'\*.qvk' in layout matches no parameter: pass model.named_parameters\(\)"
    with pytest.raises(ValueError, match=words):
        Modular(model.parameters(), rule({"*.qvk": [3, 3]}), LR(0.1))


def test_rules_of_one_chain_with_different_layouts_warn():
    named = list(nn.ModuleDict({"qkv": nn.Linear(4, 6, bias=False)}).named_parameters())
    fused = {"qkv.*": [3, 3]}
    (words,) = warned(Orthogonalize(layout=fused), ScaleByShape(), LR(0.1), params=named)
    assert words.endswith(
        "Orthogonalize sees qkv.weight with the layout [3, 3], but ScaleByShape sees it with None: "
        "give the same layout= to both"
    )
    same = Orthogonalize(layout=fused), NeuronNorm(layout=fused), ScaleByShape(layout=fused)
    assert warned(*same, LR(0.1), params=named) == []
    assert warned(Steepest(Orthogonalize(layout=fused)), LR(0.1), params=named) == []
    branches = {"a": Orthogonalize(layout=fused), "b": Orthogonalize()}
    parts = Partition(branches, {"qkv.*": "a"})
    assert warned(parts, LR(0.1), params=named) == []


def test_explain_names_parameters_that_will_not_move_or_move_though_frozen():
    model = nn.Linear(8, 4)
    values = model.state_dict().values()
    opt = Modular(values, Adam(), LR(0.1))
    assert head(opt) == "no parameter has requires_grad=True, so no parameter will change."
    opt = Modular([torch.zeros(3, dtype=torch.int64)], Adam(), LR(0.1))
    assert head(opt) == "no parameter has requires_grad=True, so no parameter will change."
    opt = Modular(model.parameters(), Adam(), LR(0.1))
    model(torch.ones(2, 8)).sum().backward()
    model.weight.requires_grad_(False)
    assert head(opt).startswith(
        "the step updates 1 parameter with requires_grad=False, because a gradient is set: set"
    )


def test_explain_names_an_attribute_that_was_set_for_a_live_value():
    opt = Modular([param(1.0)], Adam(), LR(0.1))
    opt.lr = 1e-3
    assert (
        head(opt) == "the attribute lr of the optimizer has no effect: set param_groups[i]['lr']."
    )


def test_explain_names_a_direction_in_front_of_another_optimizer():
    opt = torch.optim.AdamW([param(1.0)])
    handle = attach(opt, Adam())
    assert head(handle).startswith("Adam passes updates whose elements are near 1 to the next")


def test_explain_names_a_value_that_was_set_in_the_group_of_the_optimizer_too_late():
    opt = torch.optim.AdamW([{"params": [param(1.0)], "max_norm": 2.0}])
    handle = attach(opt, ClipNorm(1.0))
    assert "max_norm of" not in handle.explain()
    opt.param_groups[0]["max_norm"] = 0.1
    words = (
        "max_norm of the optimizer's group 0 is 0.1, but the transforms use 2.0: set "
        "handle.param_groups[0]"
    )
    assert head(handle).startswith(words)


@at_once("rule", [ClipPercentile(0.99), AutoClip("percentile", percentile=0.1)])
def test_a_percentile_that_looks_like_a_share_warns_with_the_percent(rule):
    (message,) = warned(rule, LR(0.1))
    share = rule.percentile
    words = (
        f"percentile={share} is less than one percent: for the fraction {share}, write percentile="
    )
    assert f"{words}{100 * share:g}" in message
    assert warned(ClipPercentile(0), LR(0.1)) == warned(ClipPercentile(1), LR(0.1)) == []


def test_the_warning_names_the_line_of_the_user():
    with pytest.warns(UserWarning, match="reverses the step") as caught:
        Modular([param(1.0)], Adam(), Scale(-0.1))
    assert caught[0].filename == __file__


def test_clipping_that_acts_in_one_group_does_not_warn():
    groups = [{"params": [param(1.0)]}, {"params": [param(1.0)], "max_norm": 0.5}]
    assert warned(Normalize(), ClipNorm(1.0), LR(0.1), params=groups) == []
    groups[1]["max_norm"] = 2.0
    assert len(warned(Normalize(), ClipNorm(1.0), LR(0.1), params=groups)) == 1


@at_once(
    "chain",
    [
        [Normalize(), ClipNorm(1.0), LR(0.1)],
        [Normalize(0.5), ClipNorm(1.0, dim=-1), LR(0.1)],
        [Normalize(dim="global"), ClipValue(1.0), LR(0.1)],
        [Normalize(ord=1), ClipNorm(2.0), LR(0.1)],
        [Normalize(ord="rms"), ClipRMS(1.0), LR(0.1)],
        [Sign(), ClipRMS(1.0), LR(0.1)],
        [ClipNorm(1.0, dim="global"), ClipNorm(1.0), LR(0.1)],
    ],
)
def test_clipping_that_is_said_never_to_clip_changes_nothing(chain):
    ends = []
    for links in (chain, [chain[0], chain[2]]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt = Modular(model.parameters(), *links)
        for _ in range(3):
            opt.zero_grad()
            (model(torch.randn(16, 8)) * 100).square().mean().backward()
            opt.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
