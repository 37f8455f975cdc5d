"""Chains over three small parameters in two groups, for the tests of this folder."""

import pytest
import torch

from torchzero_clip import (
    EMA,
    LR,
    Adagrad,
    Adam,
    Cautious,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    Lion,
    Modular,
    Momentum,
    NormalizeByEMA,
    RMSprop,
    Scale,
    Warmup,
    WeightDecay,
)

CHAINS = {
    "sgd": lambda: (ClipNorm(1.0), LR(0.1)),
    "adam": lambda: (ClipNorm(1.0, dim="global"), Adam(), LR(0.1)),
    "adamw": lambda: (Adam(amsgrad=True), WeightDecay(0.01), LR(0.1)),
    "momentum": lambda: (Momentum(0.9, nesterov=True), LR(0.1)),
    "rmsprop": lambda: (RMSprop(momentum=0.5, centered=True), LR(0.1)),
    "adagrad": lambda: (Adagrad(0.1, 0.1), LR(0.1)),
    "lion": lambda: (Lion(), Cautious(), LR(0.1), Warmup(5)),
    "growth": lambda: (ClipNormGrowth(), ClipValueGrowth(), LR(0.1)),
    "growth global": lambda: (ClipNormGrowth(dim="global"), Adam(), LR(0.1)),
    "growth group": lambda: (ClipNormGrowth(dim="group"), Adam(), LR(0.1)),
    "growth layer": lambda: (ClipNormGrowth(dim="layer"), Adam(), LR(0.1)),
    "ema": lambda: (
        ClipNormByEMA(0.9),
        NormalizeByEMA(0.9, dim="global"),
        ClipValueByEMA(0.9, ema_tfm=Chain(EMA(0.5), Scale(2.0))),
        EMA(0.5, debias=True),
        LR(0.1),
    ),
}
NAMES = ("a.weight", "a.bias", "b.weight")
SHAPES = ((3, 4), (3,), (2, 3))


def parameters(dtype=torch.float32, shapes=SHAPES, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen).to(dtype).requires_grad_() for s in shapes]


def give_grads(params, step, scale=1.0):
    gen = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=gen) * scale
        p.grad = (grad + 0.1 * p.detach().float()).to(p.dtype)


def train(opt, params, steps, start=0):
    for step in range(start, start + steps):
        give_grads(params, step)
        opt.step()
    return params


def groups(params, names=True):
    """Two groups, the second with a learning rate of its own; named, as layers need it."""
    given = list(zip(NAMES, params, strict=True)) if names else params
    return [{"params": given[:2]}, {"params": given[2:], "lr": 0.03}]


each_chain = pytest.mark.parametrize("chain", CHAINS)


def trained(*links, shapes=SHAPES, dtype=torch.float32):
    params = parameters(dtype, shapes)
    opt = Modular(params, *links)
    train(opt, params, 2)
    return opt
