"""An optimizer holds nobody, and parameters may be exchanged under it."""

import gc
import weakref

import torch

from tests.helpers import equal, one
from tests.optimizer.chains import CHAINS, each_chain, groups, parameters, train
from torchzero_clip import LR, Adam, Modular


def test_no_reference_cycle_keeps_the_optimizer_alive():
    params = parameters()
    # the first step of a process imports torch.compile, which keeps a frame of this step in a cycle
    train(Modular(params, LR(0.1)), params, 1)
    gc.collect()
    gc.disable()
    try:
        for chain in CHAINS.values():
            params = parameters()
            opt = Modular(groups(params), *chain())
            train(opt, params, 2)
            opt.init_state()
            opt.load_state_dict(opt.state_dict())
            opt_ref, param_ref = weakref.ref(opt), weakref.ref(params[0])
            del opt, params
            assert opt_ref() is None
            assert param_ref() is None
    finally:
        gc.enable()


@each_chain
def test_no_part_of_an_optimizer_waits_for_the_garbage_collector(chain):
    opt = Modular(groups(parameters()), *CHAINS[chain]())
    gc.collect()
    del opt
    assert gc.collect() == 0


@each_chain
def test_the_data_of_parameters_may_be_replaced_between_steps(chain):
    swapped, reference = parameters(), parameters()
    a, b = Modular(groups(swapped), *CHAINS[chain]()), Modular(groups(reference), *CHAINS[chain]())
    for step in range(4):
        train(a, swapped, 1, step), train(b, reference, 1, step)
        for p in swapped:
            p.data = p.data.clone()
            for key, value in a.state.get(p, {}).items():
                a.state[p][key] = value.clone()
    assert equal(swapped, reference)


@each_chain
def test_parameters_may_be_exchanged_as_accelerate_does(chain):
    old, reference = parameters(), parameters()
    a, b = Modular(groups(old), *CHAINS[chain]()), Modular(groups(reference), *CHAINS[chain]())
    train(a, old, 2), train(b, reference, 2)
    new = [p.detach().clone().requires_grad_() for p in old]
    place = {id(p): q for p, q in zip(old, new, strict=True)}
    for group in a.param_groups:
        group["params"] = [place[id(p)] for p in group["params"]]
    for p, q in zip(old, new, strict=True):
        if p in a.state:
            a.state[q] = a.state.pop(p)
    before = [p.detach().clone() for p in old]
    train(a, new, 2, start=2), train(b, reference, 2, start=2)
    assert equal(new, reference)
    assert equal([p.detach() for p in old], before)


def test_a_parameter_may_change_its_dtype_before_the_first_step():
    p = one()
    opt = Modular([p], Adam(), LR(0.1))
    p.data, p.grad = p.data.double(), None
    p.grad = torch.ones(1, dtype=torch.float64)
    opt.step()
    assert opt.state[p]["Adam/exp_avg"].dtype == torch.float64
