"""Groups that are added later, and many of them."""

import pytest

from tests.helpers import at_once, one
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Modular,
    Momentum,
    TensorList,
    WeightDecay,
    ZClip,
)


def test_an_added_group_trains_with_its_own_values():
    a, b = one(), one()
    opt = Modular([a], Momentum(0.5), LR(0.1))
    opt.step()
    opt.add_param_group({"params": [b], "lr": 0.2})
    assert opt.param_groups[1]["momentum"] == 0.5
    opt.step()
    assert a.item() == pytest.approx(1 - 0.1 - 0.15)
    assert b.item() == pytest.approx(1 - 0.2)


def test_an_added_group_joins_the_global_norm_and_its_memory():
    a, b = one(grad=3.0), one(grad=4.0)
    opt = Modular([a], ClipNormGrowth(dim="global"))
    opt.step()  # p = 3
    opt.add_param_group({"params": [b]})
    a.data.zero_(), b.data.zero_()
    opt.step()
    assert (-a.item(), -b.item()) == pytest.approx((3 * 4.5 / 5, 4 * 4.5 / 5))


@at_once("compile", [False, True])
def test_groups_that_were_put_in_place_of_others_are_refused_in_a_sentence(compile):
    for ready in (False, True):
        a = one()
        opt = Modular([a], ClipNorm(1.0), LR(0.1), compile=compile)
        if ready:
            opt.step()
        before, opt.param_groups = opt.param_groups, [{"params": [a]}]
        with pytest.raises(
            ValueError, match="group 0: param_groups must not be replaced: call add_param_group"
        ):
            opt.step()
        opt.param_groups = before
        opt.step()


def test_adding_does_not_change_the_dict_that_was_given():
    given = {"params": [one()], "ClipNorm/max_norm": 0.5}
    opt = Modular([one()], ClipNorm(1.0), LR(0.1))
    opt.add_param_group(given)
    assert set(given) == {"params", "ClipNorm/max_norm"}
    assert opt.param_groups[1]["max_norm"] == 0.5


@pytest.mark.parametrize("bad", [{"max_nrom": 0.5}, {"max_norm": -1.0}, {"weight_decay": 0.1}])
def test_a_group_that_is_refused_is_not_added(bad):
    opt = Modular([one()], ClipNorm(1.0), LR(0.1))
    with pytest.raises(ValueError, match=r"max_norm|weight_decay"):
        opt.add_param_group({"params": [one()], **bad})
    assert len(opt.param_groups) == 1


def test_a_group_without_names_is_refused_where_layers_need_them():
    opt = Modular([("a.w", one())], ClipNorm(1.0, dim="layer"), LR(0.1))
    with pytest.raises(ValueError, match="name"):
        opt.add_param_group({"params": [one()]})
    assert len(opt.param_groups) == 1


@at_once("compile", [True, False])
@at_once("clip", [ClipNorm(1.0, dim="global"), ZClip()])
def test_many_groups_take_as_many_lists_a_group_as_few(clip, compile, monkeypatch):
    count, init = 0, TensorList.__init__

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        init(*args, **kwargs)

    monkeypatch.setattr(TensorList, "__init__", counted)
    made = []
    for n in (10, 40):
        links = clip, Adam(), WeightDecay(0.1), LR(0.1)
        opt = Modular([{"params": [one()]} for _ in range(n)], *links, compile=compile)
        if compile:
            opt.engine = opt.engine.twin()
        before = count
        opt.step()
        made.append((count - before) / n)
    assert made[1] < 1.1 * made[0]
