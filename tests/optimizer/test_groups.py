"""Groups that are added later."""

import pytest

from tests.helpers import one
from torchzero_clip import LR, ClipNorm, ClipNormGrowth, Modular, Momentum


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
