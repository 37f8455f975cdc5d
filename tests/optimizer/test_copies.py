"""Copies and pickles of an optimizer, and groups handed to another one."""

import copy
import pickle

import pytest

from tests.helpers import equal, one, state_of
from tests.optimizer.chains import CHAINS, each_chain, groups, parameters, train
from torchzero_clip import LR, ClipNorm, ClipNormGrowth, Modular, Scale


@each_chain
def test_a_deepcopy_goes_its_own_way(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 2)
    copied, twin = copy.deepcopy((opt, params))
    assert equal(state_of(copied), state_of(opt))
    before = state_of(opt)
    train(copied, twin, 2, start=2)
    assert equal(state_of(opt), before)
    train(opt, params, 2, start=2)
    assert equal(params, twin)
    assert equal(state_of(copied), state_of(opt))


@each_chain
def test_pickling_keeps_chain_state_and_values(chain):
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    opt.param_groups[0]["lr"] = 0.123
    train(opt, params, 2)
    copied, twin = pickle.loads(pickle.dumps((opt, params)))
    assert repr(copied.chain) == repr(opt.chain)
    train(copied, twin, 2, start=2), train(opt, params, 2, start=2)
    assert equal(params, twin)
    assert equal(state_of(copied), state_of(opt))
    assert copied.defaults.items() >= opt.defaults.items()  # torch adds a key of its own


def test_a_copy_still_checks_its_keys_and_takes_hooks():
    opt = copy.deepcopy(Modular([one()], ClipNorm(1.0), LR(0.1)))
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append(1))
    opt.step()
    assert calls == [1]
    with pytest.raises(ValueError, match="did you mean 'max_norm'"):
        opt.add_param_group({"params": [one()], "max_nrm": 1.0})


@pytest.mark.parametrize("dim", ["global", "group"])
def test_groups_handed_to_another_optimizer_bring_a_copy_of_their_memory(dim):
    p = one(0.0)
    first = Modular([p], ClipNormGrowth(dim=dim))
    first.step()
    second = Modular(first.param_groups, ClipNormGrowth(dim=dim))
    p.grad.fill_(100.0)
    p.data.zero_()
    second.step()
    assert -p.item() == pytest.approx(1.5)
    p.data.zero_()
    second.step()
    assert -p.item() == pytest.approx(2.25)
    p.data.zero_()
    first.step()
    assert -p.item() == pytest.approx(1.5)  # not touched by the second


def test_groups_handed_to_another_chain_start_afresh():
    p = one(0.0)
    first = Modular([p], ClipNormGrowth(dim="global"))
    first.step()
    second = Modular(first.param_groups, ClipNormGrowth(dim="global"), Scale(1.0))
    p.grad.fill_(100.0)
    p.data.zero_()
    second.step()
    assert -p.item() == 100.0
