"""What a chain means is said in words: warnings at construction, errors, sentences of `explain`."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from tests.helpers import at_once, network, param
from tests.modules.rows.row import with_lr
from tests.table import every
from torchzero_clip import (
    LR,
    Adam,
    AdaptiveClip,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    ClipRMS,
    Freeze,
    Graft,
    Guard,
    Hyperball,
    Identity,
    Live,
    Masked,
    MaxNorm,
    Modular,
    Momentum,
    Normalize,
    NormRule,
    Orthogonalize,
    Partition,
    Project,
    Scale,
    Scope,
    Shampoo,
    Sign,
    Transform,
    TrustRatio,
    WeightDecay,
    When,
    ZClip,
    ZStat,
    attach,
    groups,
    matrices_and_rest,
    named,
    optimizer_class,
    release,
)
from torchzero_clip.optimizer.explain import with_present_values
from torchzero_clip.published import NAMES

NO_LR = "the chain has no learning rate, so updates are subtracted without scaling"


class Rated(Transform):
    """A rule with a learning rate of its own."""

    lr: Live[float] = 0.1

    def update(self, u, state, group):
        return u.sign().mul_(group["lr"])


def kinds(name, p):
    return "a" if p.dim() > 1 else "b"


def said(*chain, make=Modular):
    """What making an optimizer with the chain warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make([param(1.0)], *chain)
    return [str(warning.message) for warning in caught]


def explained(*chain, groups=None, make=Modular):
    """The sentences in front of the plan."""
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = make(groups or model.parameters(), *chain)
    text = opt.explain()
    head = text.partition("\n\n")[0]
    return (
        []
        if head.startswith(repr(with_present_values(opt))[len("Chain(") : -1])
        else head.splitlines()
    )


# ---------------------------------------------------------------------- no learning rate


@at_once(
    "chain",
    [
        [Adam()],
        [ClipNorm(1.0)],
        [Sign()],
        [Guard(), Momentum(0.9), WeightDecay(0.1)],
        [Scale(-1), Adam()],
        [Partition({"a": Chain(Adam(), Scale(0.1)), "b": Sign()}, kinds)],
        [Orthogonalize(), ClipNorm(0.1)],
    ],
)
def test_a_chain_without_a_learning_rate_warns_once_with_the_way_to_silence_it(chain):
    (message,) = said(*chain)
    assert message.startswith(NO_LR)
    assert repr(Chain(*chain)) in message
    assert "or LR(1.0) for no scaling. Schedulers also need an lr" in message
    assert said(*chain, LR(1.0)) == []


@at_once(
    "chain",
    [
        [Adam(), LR(1e-3)],
        [ClipNorm(1.0), Scale(1e-3)],
        [Chain(Chain(Adam(), LR(0.1)))],
        [Adam(), LR(0.1), ClipNorm(0.1), MaxNorm(1.0), Hyperball()],
        [Partition({"a": Chain(Adam(), Scale(0.1)), "b": Scale(1.0)}, kinds)],
        [Rated()],
        [LR(0.1), Momentum(0.9)],
        [Scale(0.5), Adam(), LR(0.1)],
        [When(lambda step: True, Chain(Adam(), LR(0.1)))],
        [Graft(Momentum(), Adam()), LR(0.1)],
        [LR(0.1), AdaptiveClip(ZStat())],
    ],
)
def test_a_chain_with_a_size_of_its_own_warns_of_nothing(chain):
    assert said(*chain) == []


@at_once("name", NAMES)
def test_a_published_method_warns_of_nothing(name):
    params = [nn.Parameter(torch.ones(2, 2))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Modular(params, named(name))
        optimizer_class(named(name))(params, lr=0.1)


def test_the_warning_names_the_line_of_the_user():
    with pytest.warns(UserWarning, match=NO_LR) as caught:
        Modular([param(1.0)], Adam())
    assert caught[0].filename == __file__


def test_copies_and_loading_and_explain_do_not_warn_again():
    opt = Modular([param(1.0)], Adam())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(opt)
        pickle.loads(pickle.dumps(opt))
        opt.load_state_dict(opt.state_dict())
        opt.explain()


def test_classes_and_release_warn_as_well():
    with pytest.warns(UserWarning, match=NO_LR):
        optimizer_class(Adam())([param(1.0)])
    with pytest.warns(UserWarning, match=NO_LR):
        release(network(), Adam()).remove()


# ---------------------------------------------------------------------- divided out


@at_once(
    "between, last",
    [
        ([], Adam()),
        ([ClipNorm(1.0)], Sign()),
        ([Momentum(0.9)], Orthogonalize()),
        ([], Normalize()),
        ([], TrustRatio()),
        ([], Chain(Freeze(lambda n, p: False), Adam())),
    ],
)
def test_a_learning_rate_that_is_divided_out_warns_once(between, last):
    (message,) = said(LR(0.1), *between, last)
    name = type(list(last)[-1] if isinstance(last, Chain) else last).__name__
    assert message.startswith(
        f"LR has no effect, because {name} after it normalizes the update: put LR after"
    )
    assert said(Scale(0.1), *between, last, LR(0.1)) == []


@at_once("other", [Sign(), Identity()])
def test_it_is_divided_out_where_a_branch_does(other):
    (message,) = said(LR(0.1), Partition({"a": Adam(), "b": other}, kinds))
    assert message.startswith("LR has no effect, because Partition/a after it")


@at_once("last", [Adam(), Sign(), Normalize()])
def test_what_is_said_to_be_divided_out_changes_nothing(last):
    ends = []
    for size in (0.25, 4.0):
        p = param(1.0, -2.0)
        opt = Modular([p], Scale(size), last, LR(0.1))
        for grad in ([1.0, 2.0], [-3.0, 0.5]):
            p.grad = torch.tensor(grad)
            opt.step()
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=0)


# ---------------------------------------------------------------------- where no step is made


@at_once(
    "links, words",
    [
        ([LR(0.1)], "set the learning rate of that optimizer"),
        (
            [ClipNorm(1.0), Masked(LR(0.1), lambda n, p: True)],
            "set the learning rate of that optimizer",
        ),
        ([Rated()], "set the learning rate of that optimizer"),
        ([ClipNorm(1.0), Scale(3e-4)], "set the learning rate of that optimizer"),
        ([Scale(-1e-3)], "set the learning rate of that optimizer"),
        ([WeightDecay(0.01), ClipNorm(1.0)], "set the weight_decay of that optimizer"),
        ([MaxNorm(1.0)], "use this transform after LR in a Modular"),
        ([Project(torch.relu)], "use this transform after LR in a Modular"),
    ],
)
def test_a_link_about_the_step_is_an_error_where_none_is_made(links, words):
    p = param(1.0)
    with pytest.raises(ValueError, match=f"^Clipper: .* cannot be used in Clipper, .*{words}"):
        Clipper([p], *links)
    opt = torch.optim.SGD([p], lr=0.1)
    with pytest.raises(ValueError, match=f"^attach: .* cannot be used in attach, .*{words}"):
        attach(opt, *links)
    attach(opt, ClipNorm(1.0)).remove()  # nothing was left behind


@at_once(
    "links",
    [
        [Scale(2**-16), ClipNorm(1.0)],
        [Scale(1e-3), ClipNorm(1.0)],
        [ClipNorm(1.0), Scale(0.25)],
        [Scale(1 / 64)],
        [Adam()],
    ],
)
def test_a_factor_of_gradients_is_none(links):
    assert said(*links, make=Clipper) == []


# ---------------------------------------------------------------------- explain


def test_explain_begins_with_what_its_warnings_say():
    assert explained(Adam()) == [f"{NO_LR}."]
    assert explained(LR(0.1), Adam()) == [
        "LR has no effect, because Adam after it normalizes the update."
    ]
    assert explained(Adam(), LR(0.1)) == []


def test_explain_counts_norms_and_names_that_of_torch():
    four = (
        "ClipNorm clips each of the 4 parameters by its own norm; for one norm over all "
        'parameters, as in torch.nn.utils.clip_grad_norm_, pass dim="global".'
    )
    assert explained(ClipNorm(1.0), Adam(), LR(0.1)) == [four]
    assert explained(ClipNorm(1.0, dim="global"), Adam(), LR(0.1)) == []
    assert explained(ClipNorm(1.0), make=Clipper) == [four]
    one = [nn.Parameter(torch.ones(3))]
    assert explained(ClipNorm(1.0), LR(0.1), groups=one) == []
    assert explained(ClipRMS(1.0), LR(0.1)) == []


def test_explain_knows_how_large_norms_are_behind_adam():
    """√6400 for the largest tensor, √7504 for all."""
    words = "ClipNorm clips updates of Adam, whose norms are near √n, here {} for"
    (line,) = explained(Adam(), ClipNorm(1.0, dim="global"), LR(0.1))
    assert line.startswith(words.format("86.63"))
    assert explained(Adam(), ClipNorm(1.0), LR(0.1))[1].startswith(words.format("80"))
    assert explained(Adam(), ClipNorm(100.0, dim="global"), LR(0.1)) == []
    assert "ClipRMS" not in str(explained(Adam(), LR(0.1), ClipNorm(1.0, dim="global")))
    assert explained(Momentum(), ClipNorm(1.0, dim="global"), LR(0.1)) == []


class Own(NormRule):
    """A rule without a field `dim`, whose limit is not known before a step."""

    share: Live[float] = 0.1

    def limit(self, norm, state, group):
        return self.measure(group["params"]).mul(group["share"])


class OwnKnown(Own):
    dim: Scope = None

    limit_is = "share"

    def limit(self, norm, state, group):
        return group["share"]


def test_explain_has_the_notes_about_norms_for_every_clipping_rule():
    one_norm = "clips each of the 4 parameters by its own norm; for one norm over all parameters, "
    one_norm += "as in torch.nn.utils.clip_grad_norm_,"
    own, after = explained(Adam(), Own(), LR(0.1))
    assert own == f'Own {one_norm} declare dim as a field of Own, and pass dim="global".'
    assert after == (
        "Own clips updates of Adam, whose norms are near √n, here 80 for n=6,400 elements: a limit "
        "below √n clips in every step; use ClipRMS for a limit that does not depend on n."
    )
    growth, after = explained(Adam(), ClipNormGrowth(), LR(0.1))
    assert growth == f'ClipNormGrowth {one_norm} pass dim="global".'
    assert after.startswith("ClipNormGrowth clips updates of Adam, whose norms are near √n")
    assert explained(ClipNormGrowth(parameterwise=False), Adam(), LR(0.1)) == []
    assert explained(Centralize(), Adam(), LR(0.1)) == []
    known, after = explained(Adam(), OwnKnown(), LR(0.1))
    assert known == f'OwnKnown {one_norm} pass dim="global".'
    assert after.startswith("OwnKnown clips updates of Adam, whose norms are near √n")


def halves(**values):
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 16))
    return groups(model, {"0.*": values}, decay_vectors=True)


def test_explain_reports_groups_with_different_limits_for_one_norm():
    made = halves(max_norm=0.5)
    assert explained(ClipNorm(1.0, dim="global"), Adam(), LR(0.1), groups=made) == [
        "ClipNorm uses one norm over all parameters, but the groups have different values of "
        "max_norm: each group has its own limit for the same norm; for one norm per parameter "
        'group, use dim="group".'
    ]
    made = halves(z_thresh=1.5)
    (line,) = explained(ZClip(), Adam(), LR(0.1), groups=made)
    assert "values of z_thresh: each group has its own limit for the same norm, and the" in line
    assert "the state of a norm follows the values of the first group; for one" in line
    layers = [ClipNorm(1.0, dim="layer"), Adam(), LR(0.1)]
    assert explained(*layers, groups=halves(max_norm=0.5)) == []
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 16))
    made = groups(model, {"0.bias": {"max_norm": 0.5}})
    (line,) = explained(*layers, groups=made)
    assert line.startswith("ClipNorm uses one norm per layer, but the groups have different values")
    for dim in ("group", None):
        lines = explained(ClipNorm(1.0, dim=dim), Adam(), LR(0.1), groups=halves(max_norm=0.5))
        assert "different values" not in str(lines)
    for other in ({"clip": False}, {"norm_group": "first"}):
        made = halves(max_norm=0.5, **other)
        lines = explained(ClipNorm(1.0, dim="global"), Adam(), LR(0.1), groups=made)
        assert "different values" not in str(lines)
        assert len(lines) == 1


def test_the_state_of_a_norm_over_several_groups_follows_the_first_group():
    class Scaled(NormRule):
        dim: Scope = None
        level: Live[float] = 1.0

        def init_unit(self):
            return {"seen": 0.0}

        def limit(self, norm, state, group):
            return torch.full_like(norm, group["level"])

        def observe(self, norm, clipped, state, group):
            return {"seen": norm * group["level"]}

    a, b = param(0.0), param(0.0)
    made = [{"params": [a], "level": 2.0}, {"params": [b], "level": 1.0}]
    opt = Modular(made, Scaled(dim="global"), LR(1.0))
    a.grad = torch.tensor([3.0])
    b.grad = torch.tensor([4.0])
    opt.step()
    assert (a.item(), b.item()) == pytest.approx((-3 * 2 / 5, -4 * 1 / 5))
    states = [group["chain"]["Scaled/seen"].item() for group in opt.param_groups]
    assert states == [10.0, 10.0]


def test_explain_reports_groups_that_only_weight_decay_separates():
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 16))
    chain = [ClipNorm(1.0, dim="group"), Adam(), WeightDecay(0.1), LR(0.1)]
    made = groups(model, {"0.*": {"max_norm": 0.5}})
    assert explained(*chain, groups=made) == [
        "ClipNorm uses separate norms for the groups 0 and 1, which differ only in "
        "weight_decay; for one norm over both, pass decay_vectors=True to groups(...), or use "
        'dim="global" and a norm_group.'
    ]
    assert explained(*chain, groups=halves(max_norm=0.5)) == []
    networks = [{"params": list(layer.parameters())} for layer in model]
    assert explained(*chain, groups=networks) == []


def header(opt):
    lines = opt.explain().splitlines()
    return next(line for line in lines if line.startswith(("ClipNorm(", "Masked(")))


def test_the_header_of_explain_shows_the_values_that_act():
    limit = ClipNorm(1.0, dim="global")
    opt = Modular([param(1.0)], limit, Adam(), LR(0.1))
    opt.param_groups[0]["max_norm"] = 0.25
    assert header(opt) == "ClipNorm(max_norm=0.25, dim='global'), Adam(), LR(lr=0.1)"
    assert limit.max_norm == 1.0

    made = halves(max_norm=5.0, betas=(0.5, 0.9), lr=0.2)
    assert header(Modular(made, ClipNorm(0.5, dim="global"), Adam(), LR(0.1))) == (
        "ClipNorm(max_norm=0.5 to 5.0, dim='global'), Adam(betas=(0.5, 0.9) or (0.9, 0.999)), "
        "LR(lr=0.1 to 0.2)"
    )
    made = halves(**{"Masked/ClipNorm_2/max_norm": 3.0})
    opt = Modular(made, Masked(Chain(limit, Chain(limit)), kinds), LR(0.1))
    assert header(opt).startswith(
        "Masked(tfm=Chain(ClipNorm(max_norm=1.0, dim='global'), Chain(ClipNorm(max_norm=1.0 to "
        "3.0, dim='global'))), where=kinds)"
    )


@every()
def test_the_header_of_explain_is_the_chain_if_nothing_has_changed(case):
    model = nn.Sequential(nn.Linear(30, 40, bias=not case.matrices))
    opt = Modular(model.named_parameters(), *with_lr(case.make(), 1e-3))
    assert repr(with_present_values(opt)) == repr(opt.chain)


def test_the_norm_behind_adam_is_what_explain_says():
    model = nn.Linear(100, 64)
    opt = Modular(model.parameters(), Adam(), ClipNorm(1.0, dim="global"), LR(0.0))
    model(torch.randn(32, 100)).square().sum().backward()
    opt.step()
    norm = opt.metrics()["ClipNorm/norm"].item()
    assert norm == pytest.approx((100 * 64 + 64) ** 0.5, rel=0.01)


@pytest.mark.parametrize("chain", [[ClipNorm(2.0)], [Guard(), ZClip()]], ids=["each", "all"])
@pytest.mark.parametrize("limit", [None, 0.5, 1.0])
def test_explain_notices_a_clip_of_somebody_else_in_front(chain, limit):
    model = network()
    opt = Modular(model.parameters(), *chain, Adam(), LR(1e-3))
    for i in range(3):
        opt.zero_grad()
        model(10 * torch.randn(8, 4, generator=torch.Generator().manual_seed(i))).sum().backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        opt.step()
    found = [line for line in opt.explain().splitlines() if "in the last step" in line]
    assert len(found) == (limit is not None)
    for line in found:
        assert line.startswith(f"the global norm of the gradients was {limit} in the last step, so")


def test_explain_names_the_vectors_that_a_rule_for_matrices_passes_on():
    note = "Graft/direction_of has no effect on the updates of bias."
    model = nn.Linear(4, 3)
    opt = Modular(model.named_parameters(), named("shampoo"))
    assert note in opt.explain()
    for grad in (torch.tensor([3.0, 4.0, 12.0]), torch.tensor([4.0, -3.0, 0.0])):
        before = model.bias.detach().clone()
        model.weight.grad = torch.ones(3, 4)
        model.bias.grad = grad.clone()
        opt.step()
        step = before - model.bias.detach()  # along the gradient, without momentum
        torch.testing.assert_close(step / step.norm(), grad / grad.norm(), rtol=1e-4, atol=1e-4)
    parts = {"matrices": Graft(Adam(), Shampoo()), "rest": Adam()}
    parted = Partition(parts, matrices_and_rest(model))
    assert (
        "has no effect on the updates"
        not in Modular(model.named_parameters(), parted, LR(1.0)).explain()
    )
