"""The names of live values in the groups."""

import re

import pytest
import torch

from tests.helpers import one, saved
from torchzero_clip import (
    LR,
    Adagrad,
    Adam,
    AdaptiveClip,
    AutoClip,
    Chain,
    ClipNorm,
    ClipValue,
    ClipValueByEMA,
    Mars,
    Modular,
    Momentum,
    Partition,
    Quantile,
    Reset,
    RMSprop,
    Scale,
    ScheduleFree,
    SpikeClip,
    WeightDecay,
    named,
)


def keys(*links):
    group = Modular([one()], *links).param_groups[0]
    return set(group) - {"params", "chain"}


def test_a_name_with_one_owner_is_bare_and_one_with_several_is_qualified():
    assert keys(ClipNorm(1.0), Adam(), LR(0.1)) == {"max_norm", "betas", "eps", "lr"}
    assert keys(ClipNorm(1.0), ClipNorm(2.0), LR(0.1)) == {
        "ClipNorm/max_norm",
        "ClipNorm_2/max_norm",
        "lr",
    }
    assert keys(Adam(), Adagrad(), LR(0.1)) == {
        "betas",
        "Adam/eps",
        "Adagrad/eps",
        "lr_decay",
        "lr",
    }


@pytest.mark.parametrize(("name", "key"), [("muon", "beta"), ("normuon", "EMA/beta")])
def test_the_momentum_of_a_link_that_calls_it_otherwise_is_pointed_to(name, key):
    """The loops of others write group["momentum"]."""
    words = f"a parameter group has momentum=0.5, but EMA uses the name '{key}'"
    with pytest.raises(ValueError, match=words):
        Modular([{"params": [one()], "momentum": 0.5}], named(name))


def after(opt, steps=4, **live):
    """Where a weight is after some steps with these live values."""
    opt.param_groups[0].update(live)
    (p,) = opt.param_groups[0]["params"]
    for step in range(steps):
        p.grad = torch.full_like(p, float(step % 3) - 0.5)
        opt.step()
    return p.item()


def test_a_value_of_none_is_that_of_the_link_that_has_it():
    """As long as it is None: it may become a number, and None again."""
    a, b = (Modular([one()], Mars(beta, 0.5), Adam((0.8, 0.9))) for beta in (None, 0.8))
    for live in ({}, {"beta": 0.3}, {"beta": 0.7, "betas": (0.7, 0.9)}):
        assert after(a, **live) == after(b, **live)
    assert after(a, beta=None, betas=(0.6, 0.9)) == after(b, beta=0.6, betas=(0.6, 0.9))


def test_a_value_may_become_that_of_another_link_where_there_is_one():
    ours, theirs = (Modular([one()], SpikeClip(2.0, beta), Adam()) for beta in (0.5, None))
    assert after(ours, beta=None) == after(theirs)
    alone = Modular([one()], SpikeClip(2.0, 0.5))
    words = "SpikeClip reads betas, but no transform has betas: add Adam(...) to the transforms"
    with pytest.raises(ValueError, match=re.escape(words)):
        after(alone, beta=None)
    with pytest.raises(ValueError, match=re.escape(words)):
        Modular([one()], SpikeClip(2.0, None))


def test_of_several_links_that_have_the_value_the_nearest_counts():
    def branch(first, second):
        return Partition({"a": Chain(Mars(None, 0.5), Adam(first)), "b": Adam(second)}, {"*": "a"})

    def both(*pairs):
        return after(Modular([("w", one())], branch(*pairs), LR(0.1)))

    alone = after(Modular([("w", one())], Mars(0.3, 0.5), Adam((0.3, 0.9)), LR(0.1)))
    assert both((0.3, 0.9), (0.8, 0.9)) == alone
    with pytest.raises(
        ValueError, match=r"Mars reads betas, so only one transform may .*, got \['Adam'"
    ):
        Modular([one()], Mars(None), Adam(), Adam())


OWN_NUMBERS = {  # chains of these names in which each link has a number of its own
    "spam": lambda: Chain(
        Reset(Chain(SpikeClip(5000.0, 0.999, 20, 500), Adam(eps=1e-6)), 500, 150, keep=("step",)),
        WeightDecay(0.0, afterwards=True),
        LR(1e-3),
    ),
    "mars_adamw": lambda: Chain(
        Mars(0.95), ClipNorm(1.0), Adam((0.95, 0.99)), WeightDecay(0.0), LR(3e-3)
    ),
    "schedule_free_adamw": lambda: Chain(
        Adam((0.0, 0.999)), WeightDecay(0.0), LR(2.5e-3), ScheduleFree()
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.*different arguments of the transforms"
)  # ScheduleFree's Adam has one
@pytest.mark.parametrize("name", OWN_NUMBERS)
def test_a_checkpoint_goes_on_with_the_numbers_that_it_has_where_none_was_given(name):
    before = Modular([one()], OWN_NUMBERS[name]())
    after(before)
    now = Modular([one(before.param_groups[0]["params"][0].item())], named(name))
    with pytest.warns(UserWarning, match=r"beta: 0\.9\d* from the checkpoint replaces None"):
        now.load_state_dict(saved(before.state_dict()))
    assert after(now) == after(before)


def test_a_name_of_its_own_stands_for_the_class():
    assert keys(ClipNorm(1.0, name="early"), ClipNorm(2.0, name="late")) == {
        "early/max_norm",
        "late/max_norm",
    }


def test_nested_names_follow_the_nesting_and_are_numbered_per_level():
    inner = ClipValueByEMA(0.5, ema_tfm=Chain(Scale(1.0), Scale(2.0)))
    assert keys(Scale(3.0), inner) == {
        "Scale/factor",
        "beta",
        "ClipValueByEMA/Scale/factor",
        "ClipValueByEMA/Scale_2/factor",
    }
    chain = Chain(ClipNorm(1.0), LR(0.1), name="front")
    assert keys(chain, ClipNorm(2.0)) == {"front/ClipNorm/max_norm", "ClipNorm/max_norm", "lr"}


def test_an_unnamed_chain_dissolves():
    assert keys(Chain(ClipNorm(1.0)), Chain(ClipNorm(2.0), LR(0.1))) == {
        "ClipNorm/max_norm",
        "ClipNorm_2/max_norm",
        "lr",
    }


def test_two_links_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="names of transforms must differ"):
        Modular([one()], ClipNorm(1.0, name="x"), ClipNorm(1.0, name="x_2"), Scale(1.0, name="x"))


def test_the_qualified_form_is_always_accepted():
    a, b = one(grad=10.0), one(grad=10.0)
    opt = Modular([{"params": [a]}, {"params": [b], "ClipNorm/max_norm": 0.5}], ClipNorm(1.0))
    assert "ClipNorm/max_norm" not in opt.param_groups[1]
    opt.step()
    assert (a.item(), b.item()) == pytest.approx((0.0, 0.5), abs=1e-7)


def test_the_qualified_form_may_be_set_in_a_group_later():
    p = one(grad=10.0)
    opt = Modular([p], ClipNorm(1.0))
    opt.param_groups[0]["ClipNorm/max_norm"] = 3.0
    opt.step()
    assert p.item() == -2.0
    assert opt.param_groups[0]["max_norm"] == 3.0


def test_all_live_values_are_in_defaults():
    opt = Modular([one()], ClipNorm(1.0), ClipNorm(2.0), Momentum(0.8), LR(0.1))
    assert opt.defaults == {
        "ClipNorm/max_norm": 1.0,
        "ClipNorm_2/max_norm": 2.0,
        "momentum": 0.8,
        "dampening": 0.0,
        "lr": 0.1,
    }


def test_one_link_may_own_lr():
    with pytest.raises(ValueError, match=r"only one transform may have an lr.*LR_2.*groups.*Scale"):
        Modular([one()], LR(0.1), Adam(), LR(0.2))


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("max_nrom", "max_norm"),
        ("maxnorm", "max_norm"),
        ("beta", "betas"),
        ("Lr", "lr"),
        ("LR", "lr"),
        ("ClipNorm/max_nrm", "ClipNorm/max_norm"),
    ],
)
def test_a_misspelt_key_is_an_error_with_the_suggestion(key, suggestion):
    links = ClipNorm(1.0), Adam(), LR(0.1)
    with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{suggestion}'"):
        Modular([{"params": [one()], key: 0.5}], *links)
    opt = Modular([one()], *links)
    with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{suggestion}'"):
        opt.add_param_group({"params": [one()], key: 0.5})
    opt.param_groups[0][key] = 0.5
    with pytest.raises(ValueError, match=f"'{key}'.*did you mean '{suggestion}'"):
        opt.step()


def test_an_ambiguous_bare_key_is_an_error_with_the_choices():
    with pytest.raises(ValueError, match=r"'max_norm'.*ClipNorm/max_norm.*ClipNorm_2/max_norm"):
        Modular([{"params": [one()], "max_norm": 1.0}], ClipNorm(1.0), ClipNorm(2.0))


def test_both_forms_of_one_key_are_an_error():
    group = {"params": [one()], "max_norm": 1.0, "ClipNorm/max_norm": 2.0}
    with pytest.raises(ValueError, match="both 'ClipNorm/max_norm' and 'max_norm'"):
        Modular([group], ClipNorm(1.0))


@pytest.mark.parametrize(
    ("key", "value", "link"),
    [
        ("weight_decay", 0.1, "WeightDecay"),
        ("lr", 0.1, "LR"),
        ("momentum", 0.9, "Momentum"),
        ("betas", (0.9, 0.99), "Adam"),
        ("max_norm", 1.0, "ClipNorm"),
        ("maximize", True, "Scale"),
    ],
)
def test_a_well_known_key_that_nobody_reads_is_an_error_that_names_the_link(key, value, link):
    with pytest.raises(ValueError, match=rf"{key}=.*add {link}\("):
        Modular([{"params": [one()], key: value}], ClipValue(1.0))


@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.0), ("maximize", False)])
def test_a_well_known_key_without_effect_is_kept(key, value):
    opt = Modular([{"params": [one()], key: value}], ClipValue(1.0))
    assert opt.param_groups[0][key] == value


FIXED = {  # a key, a value that the chain does not have, and the chain
    "window_size": (5, AutoClip()),
    "AutoClip/window_size": (5, AutoClip()),
    "AdaptiveClip/Quantile/window": (5, AdaptiveClip(Quantile(0.9, window=32))),
    "early/name": ("late", ClipNorm(1.0, name="early")),
    "dim": (None, ClipNorm(1.0, dim="global")),
    "amsgrad": (False, Adam(amsgrad=True)),
    "momentum": (0.0, RMSprop(momentum=0.9)),
}


@pytest.mark.parametrize("key", FIXED)
def test_a_fixed_argument_in_a_group_is_an_error_that_lists_the_live_values(key):
    value, link = FIXED[key]
    path, _, name = key.rpartition("/")
    opt = Modular([one()], link, LR(0.1))
    live = re.escape(str([*opt.defaults]))
    words = (
        f"{key}={value!r}, but the argument {name} of {path or type(link).__name__} is fixed for "
        f"all groups: pass {name}= to .*live hyperparameters, which are {live}"
    )
    with pytest.raises(ValueError, match=words):
        Modular([{"params": [one()], key: value}], link, LR(0.1))
    with pytest.raises(ValueError, match=words):
        opt.add_param_group({"params": [one()], key: value})
    opt.param_groups[0][key] = value
    with pytest.raises(ValueError, match=words):
        opt.step()


@pytest.mark.parametrize(
    ("key", "value", "link"),
    [
        ("window_size", 5, AutoClip(window_size=5)),
        ("name", "head", ClipNorm(1.0, name="early")),  # the name of the group
        ("names", ["head"], ClipNorm(1.0)),
        ("momentum", 0, RMSprop()),  # as in a group of torch's RMSprop
        ("momentum", 0.0, Adam(momentum=True)),
        ("amsgrad", None, Adam(amsgrad=True)),
    ],
)
def test_a_key_that_contradicts_no_fixed_argument_is_accepted(key, value, link):
    group = {"params": [one(grad=1.0)], key: value}
    opt = Modular([group], link, LR(0.1))
    opt.step()
    assert opt.param_groups[0][key] == value
    again = Modular([{**group, "params": [one()]}], link, LR(0.1))
    again.load_state_dict(saved(opt.state_dict()))
    assert again.param_groups[0][key] == value


def test_other_keys_are_the_users_own():
    opt = Modular([{"params": [one()], "tag": "encoder", "initial_lr": 0.1}], LR(0.1))
    opt.step()
    assert opt.param_groups[0]["tag"] == "encoder"


@pytest.mark.parametrize("key", ["max_norm", "ClipNorm/max_norm"])
def test_values_of_groups_are_checked_as_arguments_are(key):
    with pytest.raises(ValueError, match=r"ClipNorm: max_norm must be .*at least 0, got -1"):
        Modular([{"params": [one()], key: -1.0}], ClipNorm(1.0), LR(0.1))
    with pytest.raises(TypeError, match=r"ClipNorm: max_norm must be a number.*got '1'"):
        Modular([{"params": [one()], key: "1"}], ClipNorm(1.0), LR(0.1))


@pytest.mark.parametrize(
    ("key", "name"),
    [("learning_rate", "lr"), ("wd", "weight_decay"), ("max_grad_norm", "max_norm")],
)
def test_what_another_library_calls_a_live_value_is_an_error_with_its_name_here(key, name):
    chain = ClipNorm(1.0), WeightDecay(0.1), LR(0.1)
    with pytest.raises(ValueError, match=f"unknown key '{key}' of a parameter group: use '{name}'"):
        Modular([{"params": [one()], key: 0.1}], *chain)
    Modular([{"params": [one()], key: 0.1}], Scale(0.1))  # the user's own
