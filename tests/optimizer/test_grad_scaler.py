"""GradScaler: steps with inf are skipped, and gradients are unscaled once."""

import copy
import math

import torch
from torch import nn

from tests.helpers import equal, one, state_of
from torchzero_clip import LR, Adam, ClipNorm, ClipNormGrowth, Modular


def test_grad_scaler_is_left_to_unscale():
    assert not hasattr(Modular([one()], LR(0.1)), "_step_supports_amp_scaling")


def test_under_grad_scaler_the_steps_are_those_of_torch_adam():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))]
    nets.append(copy.deepcopy(nets[0]))
    opts = [
        Modular(nets[0].parameters(), Adam(), LR(0.01)),
        torch.optim.Adam(nets[1].parameters(), lr=0.01),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in nets]
    inputs = torch.randn(8, 16, 4)
    for x in inputs:
        for net, opt, scaler in zip(nets, opts, scalers, strict=True):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() != 2.0**10
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_step_with_inf_is_skipped_whole():
    p = one()
    opt = Modular([p], ClipNormGrowth(dim="global"), Adam(), LR(0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, math.inf, 1.0):
        opt.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        before, value = state_of(opt), p.detach().clone()
        scaler.step(opt)
        scaler.update()
        unchanged = equal(state_of(opt), before) and torch.equal(p, value)
        assert unchanged == math.isinf(factor)
    assert scaler.get_scale() == 2.0
    assert opt.state[p]["Adam/step"].item() == 2


def test_unscaling_first_lets_the_chain_clip_real_gradients():
    p = one(0.0)
    opt = Modular([p], ClipNorm(1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.zero_grad()
    scaler.scale((p * 0.5).sum()).backward()
    scaler.step(opt)
    assert -p.item() == 0.5
