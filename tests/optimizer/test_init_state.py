"""State that is made before the first step."""

import pytest
import torch

from tests.helpers import equal, one, saved, state_of
from tests.optimizer.chains import CHAINS, each_chain, groups, parameters, train, trained
from torchzero_clip import LR, Adam, Freeze, Modular


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_chain
def test_init_state_makes_what_the_first_step_makes_and_changes_no_step(chain, dtype):
    early, late = parameters(dtype), parameters(dtype)
    a, b = Modular(groups(early), *CHAINS[chain]()), Modular(groups(late), *CHAINS[chain]())
    a.init_state()
    fresh = state_of(a)
    a.init_state()
    assert equal(state_of(a), fresh)
    train(a, early, 1), train(b, late, 1)
    assert equal(state_of(a), state_of(b))
    layout = [{k: (v.shape, v.dtype) for k, v in s.items()} for s in fresh["state"].values()]
    after = [
        {k: (v.shape, v.dtype) for k, v in s.items()} for s in a.state_dict()["state"].values()
    ]
    assert layout == after
    chains = [set(g["chain"]) for g in fresh["param_groups"]]
    assert chains == [set(g["chain"]) for g in a.param_groups]
    train(a, early, 3, 1), train(b, late, 3, 1)
    assert equal(early, late)


def test_init_state_skips_frozen_parameters_and_keeps_what_is_there():
    a, b = one(), torch.ones(1)
    opt = Modular([a, b], Adam(), LR(0.1))
    opt.step()
    before = state_of(opt)
    opt.init_state()
    assert b not in opt.state or not opt.state[b]
    assert equal(state_of(opt), before)


def test_a_checkpoint_may_be_loaded_into_early_state():
    opt = trained(Adam(), LR(0.1))
    other = Modular(parameters(), Adam(), LR(0.1))
    other.init_state()
    other.load_state_dict(saved(opt.state_dict()))
    assert equal(state_of(other), state_of(opt))


def test_early_state_is_not_made_for_frozen_parameters():
    model = torch.nn.Linear(2, 1)
    frozen = Freeze(lambda name, p: name == "bias")
    opt = Modular(model.named_parameters(), frozen, Adam(), LR(0.1))
    opt.init_state()
    assert "Adam/exp_avg" in opt.state[model.weight]
    assert not opt.state.get(model.bias)
