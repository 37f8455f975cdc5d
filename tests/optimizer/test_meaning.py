"""What a chain means is said in words: warnings at construction, errors, sentences of `explain`."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from tests.helpers import at_once, network, param
from torchzero_clip import (
    LR,
    Adam,
    AdaptiveClip,
    Chain,
    ClipNorm,
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
    Orthogonalize,
    Partition,
    Project,
    Scale,
    Sign,
    Transform,
    TrustRatio,
    WeightDecay,
    When,
    ZClip,
    ZStat,
    attach,
    named,
    optimizer_class,
    release,
)
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
    return [] if head.startswith(repr(opt.chain)[len("Chain(") : -1]) else head.splitlines()


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
    words = "ClipNorm with max_norm=1.0 clips in every step, because norms after Adam are near √n, "
    words += "here {} for"
    (line,) = explained(Adam(), ClipNorm(1.0, dim="global"), LR(0.1))
    assert line.startswith(words.format("86.63"))
    assert explained(Adam(), ClipNorm(1.0), LR(0.1))[1].startswith(words.format("80"))
    assert explained(Adam(), ClipNorm(100.0, dim="global"), LR(0.1)) == []
    assert "ClipRMS" not in str(explained(Adam(), LR(0.1), ClipNorm(1.0, dim="global")))
    assert explained(Momentum(), ClipNorm(1.0, dim="global"), LR(0.1)) == []


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
