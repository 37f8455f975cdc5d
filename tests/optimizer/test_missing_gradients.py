"""Parameters without a gradient."""

import copy

import torch

from tests.helpers import equal, one
from tests.optimizer.chains import CHAINS, each_chain, give_grads, groups, parameters, train
from torchzero_clip import LR, Adam, Modular


@each_chain
def test_freezing_and_unfreezing(chain):
    """A frozen parameter keeps value and state; unfrozen it goes on from there."""
    params = parameters()
    opt = Modular(groups(params), *CHAINS[chain]())
    train(opt, params, 2)
    frozen = params[1]
    value, state = frozen.detach().clone(), copy.deepcopy(opt.state.get(frozen, {}))
    frozen.requires_grad_(False)
    for step in range(2, 5):
        give_grads(params, step)
        frozen.grad = None
        opt.step()
    assert torch.equal(frozen, value)
    if chain != "growth layer":  # there the layer's number goes on with the weight's
        assert equal(opt.state.get(frozen, {}), state)
    frozen.requires_grad_()
    train(opt, params, 1, start=5)
    assert not torch.equal(frozen, value)


def test_state_is_lazy_and_belongs_to_parameters_with_a_gradient():
    a, b = one(), one()
    b.grad = None
    opt = Modular([a, b], Adam(), LR(0.1))
    assert len(opt.state) == 0
    opt.step()
    assert list(opt.state) == [a]
    assert set(opt.state[a]) == {"Adam/step", "Adam/exp_avg", "Adam/exp_avg_sq"}
